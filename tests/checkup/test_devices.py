"""Drivers, occupants and links, as NVIDIA's tools tell them."""

from types import SimpleNamespace

import pytest
import torch

from project.checkup import all_reduce, devices, speed
from project.checkup.finding import Status

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tSYS\tPIX\t0-15
GPU1\tNV18\t X \tNODE\tSYS\t0-15
GPU2\tSYS\tNODE\t X \tSYS\t16-31
NIC0\tPIX\tSYS\tSYS\t X
"""


@pytest.mark.parametrize(
    ("built_for", "driver", "is_available", "status"),
    [
        ("12.4", "12.4", True, Status.GOOD),
        ("12.4", "13.0", True, Status.GOOD),
        ("12.8", "12.4", True, Status.WARNING),
        ("13.0", "12.8", False, Status.BROKEN),
        ("12.4", "12.4", False, Status.BROKEN),
        (None, "12.4", False, Status.BROKEN),
        ("12.4", None, False, Status.BROKEN),
    ],
)
def test_driver_must_run_what_torch_was_built_for(
    built_for: str | None, driver: str | None, is_available: bool, status: Status
) -> None:
    finding = devices.driver_fits(built_for, driver, is_available)
    assert finding.status == status
    assert (finding.remedy is None) == (status == Status.GOOD)


def test_links_are_read_from_the_matrix() -> None:
    links = devices.parse_topology(TOPOLOGY)
    assert links[0, 1] == links[1, 0] == "NV18"
    assert links[0, 2] == "SYS"
    assert len(links) == 6
    assert devices.parse_topology("") == {}


class Properties(SimpleNamespace):
    name, major, minor = "A GPU", 9, 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two, which torch sees as 0 and 1, and nvidia-smi as 2 and 0."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties(uuid="ca"[index]))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "sm_103f", "compute_120"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 * 2**30, 4 * 2**30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    told = {"topo": TOPOLOGY, "--query-gpu=uuid,index": "GPU-a, 0\nGPU-b, 1\nGPU-c, 2\n"}
    monkeypatch.setattr(devices, "_nvidia_smi", lambda what, *_: told[what])
    return monkeypatch


@pytest.mark.usefixtures("gpus")
def test_links_are_those_of_the_devices_that_torch_sees() -> None:
    (finding,) = devices.links(2)
    assert (finding.name, finding.value) == ("cuda:0 to cuda:1", "SYS, direct access")


@pytest.mark.parametrize("built", [["sm_75", "sm_90a", "compute_120"], ["gfx90a", "gfx942"], []])
def test_a_device_that_torch_has_code_for_is_fine(gpus: pytest.MonkeyPatch, built: list[str]) -> None:
    gpus.setattr(torch.cuda, "get_arch_list", lambda: built)
    assert devices.gpu(0, {}).value == "A GPU, 3.0 of 4.0 GiB free"


def test_a_device_older_than_all_code_is_broken(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100", "sm_103f"])
    assert devices.gpu(0, {}).status == Status.BROKEN


def test_a_device_that_can_not_be_used_is_told(gpus: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    gpus.setattr(torch.cuda, "mem_get_info", refuse)
    finding = devices.gpu(0, {})
    assert finding.status == Status.BROKEN
    assert finding.value.endswith("busy or unavailable")


def test_occupants_are_grouped_by_device() -> None:
    text = "GPU-a, 12, /usr/bin/python\nGPU-a, 13, [Not Found]\nGPU-b, 14, train, well\n"
    assert devices.parse_occupants(text) == {
        "GPU-a": ["python (12)", "[Not Found] (13)"],
        "GPU-b": ["train, well (14)"],
    }


def test_bus_bandwidth_counts_what_each_link_carries() -> None:
    assert all_reduce.bus_bandwidth(1000, num_ranks=2, seconds=2.0) == 500
    assert all_reduce.bus_bandwidth(1000, num_ranks=4, seconds=1.0) == 1500


def test_ranks_that_do_not_end_are_ended_and_told() -> None:
    (finding,) = all_reduce.check(2, timeout_s=0.2)
    assert finding.status == Status.BROKEN
    assert finding.value == "no end after 0.2 s"


@pytest.mark.gpu
def test_each_gpu_is_found_and_measured() -> None:
    names = [finding.name for finding in devices.check()]
    assert names.count("cuda:0") == 1
    measured = {finding.name: finding.figures for finding in speed.check()}
    assert measured["cuda:0 matrix product"]["gflop_per_s"] > measured["CPU matrix product"]["gflop_per_s"]
    copies = measured["host to cuda:0"]
    assert copies["pinned_gb_per_s"] > copies["pageable_gb_per_s"] * 0.8
    assert torch.cuda.device_count() == sum(name.startswith("cuda:") and " " not in name for name in names)
