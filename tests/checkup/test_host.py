"""What a host has too little of."""

import resource
from pathlib import Path

import pytest

from project.checkup import host
from project.checkup.finding import Finding, Status


@pytest.mark.parametrize(
    ("soft", "hard", "status", "remedy"),
    [
        (65536, 65536, Status.GOOD, None),
        (600, 20000, Status.WARNING, "ulimit -n 20000"),
        (256, 10**6, Status.BROKEN, "ulimit -n 65536"),
        (256, resource.RLIM_INFINITY, Status.BROKEN, "ulimit -n 65536"),
        (256, 300, Status.BROKEN, "raise the hard limit"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Status.GOOD, None),
    ],
)
def test_open_files_below_what_loaders_need(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, status: Status, remedy: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    finding = host.open_files()
    assert finding.status == status
    assert (finding.remedy or "").startswith(remedy or "")
    assert (finding.remedy is None) == (remedy is None)


def test_shared_memory_that_isnt_there_is_broken(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path / "nowhere").status == Status.BROKEN


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", float("inf")), ("", float("inf"))]
)
def test_quota_of_a_container_counts_as_cores(tmp_path: Path, text: str, cores: float) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert host._cpu_quota(tmp_path / "cpu.max") == cores


def test_disk_is_that_of_the_folder_to_come(tmp_path: Path) -> None:
    finding: Finding = host.free_disk(tmp_path / "not" / "yet")
    assert finding.value.endswith(f"free in {tmp_path}")


def test_host_whose_name_has_no_address_is_told_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "nobody-knows.invalid")
    finding = host.own_name()
    assert finding.status == Status.WARNING
    assert finding.remedy is not None
    assert "127.0.0.1 nobody-knows.invalid" in finding.remedy
