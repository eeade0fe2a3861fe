"""The doctor as a command, on this machine and on one made worse."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def doctor(folder: Path, *arguments: str, after: str = "", through: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Exit code and report; ``after`` is what the shell does first, ``through`` what the shell is started by."""
    command = f"{after} exec {sys.executable} -m project.doctor --json {' '.join(arguments)}"
    result = subprocess.run(
        [*through, "sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    return result.returncode, {"ready": report["ready"]} | {line["name"]: line for line in report["findings"]}


def test_a_machine_without_gpu_is_ready_and_measured(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "--ranks", "3")
    assert found["ready"] is True, found
    assert code == 0
    assert found["CPU matrix product"]["figures"]["gflop_per_s"] > 1
    for num_ranks in (2, 3):
        rates = found[f"all-reduce of {num_ranks} ranks"]["figures"]
        assert len(rates) == 3
        assert all(rate > 0 for rate in rates.values())


def test_a_small_limit_of_open_files_is_told_with_the_command(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "--no-speed", after="ulimit -Sn 128;")
    assert code == 1
    assert found["open files"]["status"] == "broken"
    assert found["open files"]["remedy"].startswith("ulimit -n ")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare")
@pytest.mark.parametrize(("size", "status", "code"), [("16m", "broken", 1), ("512m", "warning", 0)])
def test_small_shared_memory_is_told_with_the_command(tmp_path: Path, size: str, status: str, code: int) -> None:
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm &&"
    given, found = doctor(tmp_path, "--no-speed", after=mount, through=("unshare", "--mount"))
    assert given == code
    assert found["/dev/shm"]["status"] == status
    assert "--shm-size=8g" in found["/dev/shm"]["remedy"]


def test_the_report_for_people_ends_in_a_verdict(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "project.doctor", "--no-speed"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert "✓ torch: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Ready")


def test_bad_arguments_are_told(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "project.doctor", "--ranks", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "--ranks 1: type a number from 2 to 64" in result.stderr
