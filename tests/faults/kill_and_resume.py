"""Rounds of a run that is killed at random moments and goes on, against the same run undisturbed.

python tests/faults/kill_and_resume.py --rounds 30 --ranks 1 2 3
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from project.launch.run import Outcome

TESTS = Path(__file__).parents[1]
OPTIONS = (
    "data._target_=faults.noisy.NoisyData", "model._target_=faults.noisy.NoisyModel", "monitor=val/loss", "mode=min",
    "data.batch_size=16", "data.num_workers=0", "trainer.max_epochs=6", "trainer.log_every_n_steps=3",
    "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "trainer.accelerator=cpu",
    "callbacks=ema", "callbacks.last.every_n_steps=4", "++model.sleep_s=0.01", "test=false",
    "launch.threads_per_rank=1",
)  # fmt: skip


def on(num_ranks: int) -> tuple[str, str]:
    """What to type for as many ranks: batches that they can share, as many an epoch as of 16."""
    return f"trainer.devices={num_ranks}", f"data.batch_size={16 // num_ranks * num_ranks}"


def train(folder: Path, *overrides: str) -> Outcome:
    """Run in processes that this one starts, so that they can be killed without it; quietly.

    Raises:
        RankError: a rank was killed.
    """
    from hydra import compose, initialize_config_dir

    from project.config.composition import config_folder, register_resolvers
    from project.launch.job import run_job
    from project.launch.resume import compose_resumed

    register_resolvers()
    goes_on = (folder / "config.yaml").exists()
    typed = [f"resume={folder}" if goes_on else f"paths.run_dir={folder}", *overrides]
    config_name = compose_resumed("train", ["train", *typed])
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose(config_name, typed)
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        return run_job("project.train:train", composed, typed, "train", sweep_folder=folder)


def ranks() -> list[psutil.Process]:
    """The ranks under way: what the server of this process has forked."""
    servers = [p for p in psutil.Process().children() if "forkserver" in " ".join(p.cmdline())]
    return [rank for server in servers for rank in server.children()]


class Killer(threading.Thread):
    """Kills ranks some time after the run's first checkpoint, one of them or all."""

    def __init__(self, folder: Path, after_s: float, victims: int | None) -> None:
        super().__init__(daemon=True)
        self.folder, self.after_s, self.victims = folder, after_s, victims
        self.killed = False
        self.over = threading.Event()

    def run(self) -> None:
        while not (self.folder / "checkpoints" / "last.ckpt").exists():
            if self.over.wait(0.005):
                return
        if self.over.wait(self.after_s):
            return
        alive = ranks()
        for rank in alive[: self.victims]:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL)
                self.killed = True


def disturbed(folder: Path, overrides: tuple[str, ...], moments: random.Random, longest_s: float) -> int:
    """Train to the end however often the run is killed; how often it was."""
    from project.launch.agent import RankError
    from project.launch.resume import is_complete

    kills = 0
    while True:
        # Not more often than three times, or a slow machine would never come to the end.
        killer = Killer(folder, moments.uniform(0, longest_s), moments.choice([1, None]))
        if kills < 3:
            killer.start()
        try:
            train(folder, *(() if kills else overrides))
        except RankError:
            if not killer.killed:
                raise
            kills += 1
            if is_complete(folder):  # killed when all was done, while the process ended
                return kills
        else:
            return kills
        finally:
            killer.over.set()


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two checkpoints differ in a single bit, but for their configs, which hold paths."""
    if place in (".config", ".signature", ".callbacks", ".ranks.of_ranks[0].callbacks"):
        return []
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [d for key in one for d in differences(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{place}[{i}]")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [place]
    return [] if one == other or (one != one and other != other) else [f"{place}: {one} and {other}"]


def last(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint


def rounds(num_ranks: int, num_rounds: int, folder: Path, seed: int = 0, *more: str) -> list[dict[str, Any]]:
    """For each round how often it was killed, and where its last checkpoint differs from the undisturbed run's."""
    overrides = (*OPTIONS, *on(num_ranks), *more)
    longest_s = train(folder / "whole", *overrides).train_s
    assert longest_s is not None
    moments = random.Random(seed)
    facts = []
    for number in range(num_rounds):
        run = folder / f"round_{number}"
        began = time.monotonic()
        kills = disturbed(run, overrides, moments, longest_s)
        facts.append(
            {
                "ranks": num_ranks,
                "kills": kills,
                "differences": differences(last(folder / "whole"), last(run)),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(json.dumps(facts[-1]), flush=True)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = []
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in arguments.ranks:
            facts += rounds(num_ranks, arguments.rounds, Path(folder) / str(num_ranks), arguments.seed)
    equal = sum(not fact["differences"] for fact in facts)
    print(f"{equal} of {len(facts)} rounds bit-identical, after {sum(fact['kills'] for fact in facts)} kills")
    sys.exit(equal < len(facts))


if __name__ == "__main__":
    main()
