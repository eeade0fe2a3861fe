"""What a machine tells, and what it can't tell."""

import math
import os
import time

import pytest
import torch

from project.tracking.machine import Machine, peak_flops_per_s

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def test_memory_and_cpu_of_this_process() -> None:
    told: list[str] = []
    machine = Machine(CPU, told.append)
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass
    values = machine.read()
    assert values.keys() == {"memory_bytes", "memory_peak_bytes", "cpu"}
    assert 1e7 < values["memory_bytes"] < 1e11
    assert values["memory_peak_bytes"] > 0.5 * values["memory_bytes"]
    assert 0.1 < values["cpu"] < (os.cpu_count() or 1) + 1
    assert told == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {
        "memory_allocated": 5, "max_memory_allocated": 9, "utilization": 73, "temperature": 55, "power_draw": 250_000,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    return monkeypatch


def test_a_gpu_tells_its_use(gpu: pytest.MonkeyPatch) -> None:
    values = Machine(GPU, pytest.fail).read()
    assert (values["device_bytes"], values["device_peak_bytes"]) == (5, 9)
    assert (values["gpu_percent"], values["gpu_celsius"], values["gpu_watts"]) == (73, 55, 250)


def test_sensors_that_are_missing_are_told_once_and_no_error(gpu: pytest.MonkeyPatch) -> None:
    def missing(device: object) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    gpu.setattr(torch.cuda, "utilization", missing)
    told: list[str] = []
    machine = Machine(GPU, told.append)
    assert all("gpu" not in name for _ in range(3) for name in machine.read())
    assert len(told) == 1
    assert "pynvml does not seem to be installed" in told[0]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", math.nan),
        ("Other 9000", math.nan),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_or_unknown(
    name: str, teraflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_s(GPU) == pytest.approx(1e12 * teraflops, nan_ok=True)
    assert math.isnan(peak_flops_per_s(CPU))
