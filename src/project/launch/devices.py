"""How many ranks this host runs, and on which devices."""

from __future__ import annotations

import os
import re
from typing import Any

from project.errors import UserError

Devices = int | str | list[int]


def started_by() -> str | None:
    """What started this process as one rank of several: ``"torchrun"``, ``"slurm"``, or nothing of the kind.

    Our own launcher is torchrun's engine and sets its variables. SLURM counts only as ``srun`` with several
    tasks: a batch script that calls python once is one process, whatever the job has allocated.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        return "torchrun"
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        return "slurm"
    return None


# What launchers say in numbers, and libraries read as they are imported.
NUMBERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip


def check_environment() -> None:
    """Check what the environment says of ranks, before anything is imported that reads it.

    Raises:
        UserError: it is no number.
    """
    for name in NUMBERS:
        text = os.environ.get(name, "0")
        if not text.isdecimal():
            raise UserError(f"{name}={text} in the environment must be a whole number: type unset {name}")


def local_world_size() -> int:
    """Ranks on this host, where torchrun or SLURM started them; 1 elsewhere."""
    # SLURM writes one number per host, as in 4(x2),3.
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 1


def parse(devices: Any) -> Devices:
    """A number, a list of indices, or ``"auto"``, from what the user typed: 4, "4", auto, -1, "0,2", [0,2].

    Raises:
        UserError: it is none of these.
    """
    allowed = "type a number from 1, auto, -1 for all, or indices as [0,2]"
    if isinstance(devices, bool) or devices is None or isinstance(devices, float):
        raise UserError(f"trainer.devices={devices} is no number of devices: {allowed}")
    if isinstance(devices, str):
        text = devices.strip()
        if text == "auto":
            return text
        try:
            numbers = [int(part) for part in text.strip(",").split(",")]
        except ValueError:
            raise UserError(f"trainer.devices={devices} is no number of devices: {allowed}") from None
        devices = numbers if "," in text else numbers[0]
    if isinstance(devices, int):
        if devices == 0 or devices < -1:
            raise UserError(f"trainer.devices={devices} is no number of devices: {allowed}")
        return devices
    indices = list(devices)
    if not indices or any(not isinstance(i, int) or i < 0 for i in indices) or len(set(indices)) < len(indices):
        raise UserError(f"trainer.devices={indices} is no list of different device indices: {allowed}")
    return indices


def count(accelerator: str, devices: Any) -> int:
    """Ranks that this host runs, each on a device of its own.

    Raises:
        UserError: there are fewer devices.
    """
    wanted = parse(devices)
    if accelerator == "cpu" or (accelerator == "auto" and wanted == 1):
        return _count_on_cpu(wanted)

    import torch

    there = torch.cuda.device_count()
    if accelerator in ("auto", "gpu", "cuda") and there:
        if isinstance(wanted, list):
            if max(wanted) >= there:
                raise UserError(
                    f"trainer.devices={wanted}: this host has the CUDA devices 0 to {there - 1}: type indices of these"
                )
            return len(wanted)
        if wanted in ("auto", -1):
            return there
        assert isinstance(wanted, int)
        if wanted > there:
            raise UserError(
                f"trainer.devices={wanted}: this host has {there} CUDA device(s): type trainer.devices={there} or "
                f"less, or trainer.accelerator=cpu trainer.devices={wanted}"
            )
        return wanted
    if accelerator == "cuda" or (accelerator == "gpu" and not torch.backends.mps.is_available()):
        raise UserError(
            f"trainer.accelerator={accelerator}: this host has no CUDA device that torch {torch.__version__} can use: "
            "type trainer.accelerator=cpu"
        )
    if torch.backends.mps.is_available() and accelerator in ("auto", "gpu", "mps"):
        if wanted in ("auto", -1, 1, [0]):
            return 1
        raise UserError(
            f"trainer.devices={wanted}: this host has one MPS device: type trainer.devices=1, or "
            f"trainer.accelerator=cpu trainer.devices={wanted}"
        )
    if accelerator == "mps":
        raise UserError("trainer.accelerator=mps: this host has no MPS device: type trainer.accelerator=cpu")
    # What follows Lightning refuses where it falls back to the CPU.
    if isinstance(wanted, list):
        raise UserError(
            f"trainer.devices={str(wanted).replace(' ', '')} names GPUs, and this host has none that torch "
            f"{torch.__version__} can use: type trainer.devices={len(wanted)} for as many processes on the CPU"
        )
    if wanted == -1:
        raise UserError(
            f"trainer.devices=-1 asks for all GPUs, and this host has none that torch {torch.__version__} can use: "
            "type trainer.devices=auto"
        )
    return _count_on_cpu(wanted)


RANKS_PER_CORE = 32  # more processes than that are a slip of the keyboard, and could not all be started


def _count_on_cpu(wanted: Devices) -> int:
    if wanted in ("auto", -1):
        return 1
    ranks = len(wanted) if isinstance(wanted, list) else int(wanted)
    cores = os.cpu_count() or 1
    if ranks > RANKS_PER_CORE * cores:
        raise UserError(
            f"trainer.devices={ranks}: each CPU rank is a process, and this host has {cores} core(s): "
            f"type trainer.devices={cores}, or up to {RANKS_PER_CORE * cores}"
        )
    return ranks


def count_gpus(accelerator: str, devices: Any) -> int:
    """CUDA devices of this host that the ranks of a job take: none where they run on the CPU."""
    if accelerator not in ("auto", "gpu", "cuda"):
        return 0
    import torch

    return count(accelerator, devices) if torch.cuda.is_available() else 0


def local_cuda_device(devices: Any, local_rank: int, there: int) -> int:
    """Index of the CUDA device of a rank: its place in the list of indices, where the user gave one.

    Raises:
        UserError: the rank does not see it among the devices, of which there are so many.
    """
    wanted = parse(devices)
    index = wanted[local_rank] if isinstance(wanted, list) else local_rank
    if index >= there:
        raise UserError(
            f"the rank with local number {local_rank} takes the CUDA device {index}, and sees {there}: start no more "
            "ranks on a host than it has devices, and let each see all of them (srun without --gpus-per-task and "
            "--gpu-bind, one CUDA_VISIBLE_DEVICES for all)"
        )
    return index
