"""Faults that are put into real ranks are named."""

import time
from pathlib import Path
from typing import Any

import pytest

from project.launch import agent
from project.launch.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

LATE_IN = ("data", "transfer", "forward", "backward", "optimizer", "other")
# Verdict, and the fault of each case. Delays of 40 ms in steps of some milliseconds are named on a busy machine too.
STRAGGLERS = {
    f"{place}{' behind batch norm' if batch_norm else ''}": (
        f"straggler {rank} {place}",
        {"in": place, "rank": rank, "batch_norm": batch_norm},
    )
    for number, place in enumerate(LATE_IN)
    for batch_norm, rank in ((False, number % 2), (True, 1 - number % 2))
}
TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = STRAGGLERS | {
    "slow loaders": ("input None None", {"in": "data"}),
    "much to send for little to compute": ("synchronisation None None", {"width": 1500, "depth": 6, "batch_size": 2}),
}
# Where the ranks of FSDP gather weights, they wait for each other; a delay there shows on all.
FSDP: dict[str, tuple[str, dict[str, Any]]] = {
    f"{place} under fsdp": (f"straggler {rank} {phase}", {"in": place, "rank": rank, "strategy": "fsdp"})
    for place, rank, phase in (
        ("data", 1, "data"),
        ("transfer", 0, "transfer"),
        ("optimizer", 1, "optimizer"),
        ("other", 0, "other"),
        ("forward", 1, ""),
        ("backward", 0, ""),
    )
}
ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "a slow loader": ("input None None", {"in": "data"}),
    "a large net": ("compute None None", {"width": 1000, "depth": 4, "batch_size": 256}),
    "slow callbacks": ("host None None", {"in": "other"}),
    "a slow transfer": ("transfer None None", {"in": "transfer"}),
}
CASES = {2: TWO_RANKS | FSDP, 1: ONE_RANK}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By case; each number of ranks is started once for all of its cases."""
    told: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        for ranks, cases in CASES.items():
            config = {
                "launch": {"threads_per_rank": 1, "timeout_s": 120},
                "trainer": {"accelerator": "cpu", "devices": ranks},
                "cases": {name: case for name, (_, case) in cases.items()},
            }
            run = Run(tmp_path_factory.mktemp("ranks"), [], {}, started_at=time.time())
            told |= agent.run_ranks("fault_ranks:judge_cases", config, run, ranks).files
    return told


@pytest.mark.parametrize("name", [*CASES[1], *CASES[2]])
def test_fault_is_named_with_its_rank_and_phase(name: str, verdicts: dict[str, str]) -> None:
    expected, _ = (CASES[1] | CASES[2])[name]
    assert verdicts[name].startswith(expected), verdicts[name]


def test_ranks_and_diagnosis_are_in_tensorboard_by_default(run: Any) -> None:
    folder, _ = run("debug=none", "trainer.max_epochs=3", "trainer.devices=2", "trainer.accelerator=cpu",
                    "callbacks.tracker.interval_s=0.1", "trainer.enable_progress_bar=false")  # fmt: skip
    runs = sorted(path.name for path in (folder / "tensorboard").iterdir() if path.is_dir())
    assert runs == ["all", "rank_000", "rank_001"]
    assert "diagnosis" in (folder / "metrics.json").read_text()
