"""The driver, what torch was built for, each device, who occupies it and how they are linked."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import torch

from project.checkup.finding import Finding, Status

GIB = 2**30
OTHER_BUILD = "install the build for this driver: make TORCH_INDEX=INDEX, which pytorch.org's install selector shows"
NVIDIA_CODE = re.compile(r"(?:sm|compute)_(\d+)")  # also sm_90a, sm_103f; AMD's are called gfx942
FAR = {"SYS", "NODE"}  # through the host's memory, between or within its sockets


def check() -> Iterator[Finding]:
    """Build and driver, then each CUDA device, then the links between them."""
    yield build()
    driver = driver_cuda()
    if driver is not None or Path("/proc/driver/nvidia").exists():
        yield driver_fits(torch.version.cuda, driver, torch.cuda.is_available())
    elif torch.backends.mps.is_available():
        yield Finding("device", "Apple GPU (trainer.accelerator=mps)")
    elif not torch.cuda.is_available():
        yield Finding("device", "no GPU: ranks run on the CPU (trainer.accelerator=cpu trainer.devices=N)")
    if not torch.cuda.is_available():
        return
    occupants = parse_occupants(_nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"))
    for index in range(torch.cuda.device_count()):
        yield gpu(index, occupants)
    yield from links(torch.cuda.device_count())


def build() -> Finding:
    """What torch was built for."""
    parts = [str(torch.__version__)]
    if torch.version.cuda:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        parts += [f"CUDA {torch.version.cuda}", f"cuDNN {cudnn}" if cudnn else "without cuDNN"]
        if torch.distributed.is_nccl_available():
            parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    elif torch.version.hip:
        parts.append(f"ROCm {torch.version.hip}")
    else:
        parts.append("for the CPU")
    return Finding("torch's build", ", ".join(parts))


def driver_cuda() -> str | None:
    """The newest CUDA that the NVIDIA driver can run, as ``12.4``; None without a driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def driver_fits(built_for: str | None, driver: str | None, is_available: bool) -> Finding:
    """Whether torch can use the driver: the major version of its CUDA must not be newer.

    A newer minor version runs (NVIDIA's "minor version compatibility"), but not everything that is compiled at run
    time does.
    """
    if driver is None:
        return Finding("NVIDIA driver", "there, but it doesn't answer", Status.BROKEN, "see nvidia-smi, then reboot")
    if built_for is None:
        return Finding("NVIDIA driver", f"CUDA {driver}, but torch is a build for the CPU", Status.BROKEN, OTHER_BUILD)
    newer = [int(part) for part in built_for.split(".")] > [int(part) for part in driver.split(".")]
    value = f"up to CUDA {driver}, torch is built for {built_for}"
    if newer and built_for.split(".")[0] != driver.split(".")[0]:
        return Finding("NVIDIA driver", value, Status.BROKEN, f"{OTHER_BUILD}, or install a newer driver")
    if not is_available:
        remedy = "see CUDA_VISIBLE_DEVICES, nvidia-smi, and in a container docker run --gpus all"
        return Finding("NVIDIA driver", f"{value}, but torch finds no device", Status.BROKEN, remedy)
    if newer:
        return Finding("NVIDIA driver", value, Status.WARNING, "install a newer driver if model.compile=true fails")
    return Finding("NVIDIA driver", value)


def gpu(index: int, occupants: dict[str, list[str]]) -> Finding:
    """One CUDA device: whether torch has code for it, and how much of its memory is free.

    Args:
        index: Torch's.
        occupants: The processes on each device, by the device's UUID.
    """
    properties = torch.cuda.get_device_properties(index)
    name = f"cuda:{index}"
    code = f"sm_{properties.major}{properties.minor}"
    built = torch.cuda.get_arch_list()
    known = [int(found[1]) for arch in built if (found := NVIDIA_CODE.match(arch))]
    if known and min(known) > properties.major * 10 + properties.minor:
        value = f"{properties.name} is older ({code}) than all that torch was built for ({', '.join(built)})"
        return Finding(name, value, Status.BROKEN, OTHER_BUILD)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # one that is broken, or another process's alone
        value = f"{properties.name} can't be used: {str(error).splitlines()[0]}"
        return Finding(name, value, Status.BROKEN, "see nvidia-smi -q, or choose others: CUDA_VISIBLE_DEVICES")
    value = f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    there = occupants.get(f"GPU-{properties.uuid}", [])
    figures = {"free_gib": free / GIB, "total_gib": total / GIB}
    if free < 0.5 * total:
        value += f", used by {', '.join(there)}" if there else ""
        remedy = "wait, end them, or choose others: trainer.devices=[...] or CUDA_VISIBLE_DEVICES"
        return Finding(name, value, Status.WARNING, remedy, figures)
    return Finding(name, value, figures=figures)


def parse_occupants(text: str) -> dict[str, list[str]]:
    """From ``UUID, PID, NAME`` lines to ``{UUID: ["NAME (PID)"]}``."""
    by_device: dict[str, list[str]] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3:
            by_device.setdefault(parts[0], []).append(f"{Path(parts[2]).name} ({parts[1]})")
    return by_device


def links(num_gpus: int) -> Iterator[Finding]:
    """How each pair of devices is linked, the slow pairs as warnings."""
    topology = parse_topology(_nvidia_smi("topo", "-m"))
    numbers = parse_numbers(_nvidia_smi("--query-gpu=uuid,index", "--format=csv,noheader"))
    # nvidia-smi counts all of the host, in the order of the bus; torch those that it sees, the fastest first.
    of_torch = [numbers.get(f"GPU-{torch.cuda.get_device_properties(index).uuid}") for index in range(num_gpus)]
    for a, b in combinations(range(num_gpus), 2):
        link = topology.get((of_torch[a], of_torch[b]), "unknown link")
        direct = torch.cuda.can_device_access_peer(a, b)
        value = f"{link}, {'direct' if direct else 'no direct'} access"
        if link in FAR or not direct:
            remedy = "gradients go through the host: choose linked devices, or trainer/strategy=ddp_bf16_compress"
            yield Finding(f"cuda:{a} to cuda:{b}", value, Status.WARNING, remedy)
        else:
            yield Finding(f"cuda:{a} to cuda:{b}", value)


def parse_numbers(text: str) -> dict[str, int]:
    """From ``UUID, INDEX`` lines to nvidia-smi's number of each device."""
    rows = [line.split(", ") for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}


def parse_topology(text: str) -> dict[tuple[int | None, int | None], str]:
    """From ``nvidia-smi topo -m`` to the link of each pair of GPUs, as ``NV18``, ``PIX`` or ``SYS``."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    count = len(rows)
    return {(a, b): rows[a][1 + b] for a in range(count) for b in range(count) if a != b and 1 + b < len(rows[a])}


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        result = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return result.stdout if result.returncode == 0 else ""
