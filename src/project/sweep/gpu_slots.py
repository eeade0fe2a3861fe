"""Jobs that joblib runs at once on this host, each on GPUs of its own: all would take the first ones."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from project.launch import agent, devices
from project.launch.rank import environment_restored

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOOK_EVERY_S = 0.5
TOLD: list[str] = []  # by this process, which runs one job after another


def count() -> int:
    """GPUs that this process sees; CUDA itself is not begun with."""
    import torch

    return torch.cuda.device_count()


@contextmanager
def own_gpus(config: DictConfig) -> Iterator[None]:
    """Let this process and its ranks see as many GPUs as the job asks for, and no other job take them; wait for them.

    A job that names indices has chosen itself. One that asks for more than there are is refused where jobs are checked.
    """
    names = _visible()
    wanted = _wanted(config, len(names))
    if not 0 < wanted <= len(names):
        yield
        return
    agent.warm_up()  # the ranks' server outlives this job, and must not begin with its GPUs
    with environment_restored(), ExitStack() as held:
        os.environ[VISIBLE] = ",".join(_take(names, wanted, held))
        yield


def _visible() -> list[str]:
    """The GPUs that this process sees, by index or UUID as the environment names them."""
    there = count()
    named = os.environ.get(VISIBLE)
    names = map(str, range(there)) if named is None else (name.strip() for name in named.split(","))
    return list(names)[:there]


def _wanted(config: DictConfig, there: int) -> int:
    accelerator = OmegaConf.select(config, "trainer.accelerator")
    if not there or accelerator not in ("auto", "gpu", "cuda"):
        return 0
    wanted = devices.parse(OmegaConf.select(config, "trainer.devices"))
    return 0 if isinstance(wanted, list) else there if wanted in ("auto", -1) else int(wanted)


def _take(names: Sequence[str], wanted: int, held: ExitStack) -> list[str]:
    """Wait for so many GPUs that are free, and lock their files until ``held`` is closed or this process ends."""
    folder = Path(tempfile.gettempdir(), f"project-gpus-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    while True:
        # One looks at a time, so that no two jobs each hold half of what both need.
        with (folder / "choice").open("w") as choice, ExitStack() as looking:
            fcntl.flock(choice, fcntl.LOCK_EX)
            taken = list(islice((name for name in names if _is_locked(folder, name, looking)), wanted))
            if len(taken) == wanted:
                held.push(looking.pop_all())
                return taken
        if not TOLD:
            TOLD.append(f"A job waits for {wanted} of the {len(names)} GPUs, which other jobs have taken.")
            print(TOLD[0], flush=True)
        time.sleep(LOOK_EVERY_S)


def _is_locked(folder: Path, name: str, stack: ExitStack) -> bool:
    """Lock a GPU's file, if no other job has it."""
    file = (folder / name.replace("/", "_")).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    stack.enter_context(file)
    return True
