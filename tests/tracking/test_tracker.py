"""Faults that are put into real ranks are named."""

import time
from pathlib import Path
from typing import Any

import pytest

from project.launch import agent
from project.launch.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

Cases = dict[str, tuple[str, dict[str, Any]]]
LATE_IN = ("data", "transfer", "forward", "backward", "optimizer", "other")
KINDS = {"": {}, " behind batch norm": {"batch_norm": True}}

# Verdict, and the fault of each case. Delays of 40 ms in steps of some milliseconds are named on a busy machine too.
# A wrong rank shows only where there are more than two.
DDP: Cases = {
    f"{place}{kind}": (f"straggler {rank} {place}:", {"in": place, "rank": rank} | case)
    for number, place in enumerate(LATE_IN)
    for shift, (kind, case) in enumerate(KINDS.items())
    for rank in ((number + 2 * shift) % 3,)
}
MORE_DDP: Cases = {
    "accumulation": ("straggler 1 data:", {"in": "data", "rank": 1, "accumulate": 4, "steps": 5}),
    "several buckets": ("straggler 2 backward:", {"in": "backward", "rank": 2, "depth": 4, "bucket_mb": 0.1}),
    # Waiting for the first step's delay is that step's end, but the stopwatch runs already: one of so many.
    "Lightning's broadcast": (
        "straggler 1 optimizer:", {"in": "optimizer", "rank": 1, "broadcast": True, "steps": 33},
    ),
    "manual backward": ("straggler 2 backward:", {"in": "backward", "rank": 2, "manual": True}),
    "manual optimizer": ("straggler 1 optimizer:", {"in": "optimizer", "rank": 1, "manual": True}),
    "without recorder": ("likely straggler 1 data:", {"in": "data", "rank": 1, "recorder": False}),
    "slow loaders": ("input None None:", {"in": "data"}),
}  # fmt: skip
FSDP: Cases = {
    f"{place}{kind} under fsdp": (
        f"straggler {rank} {place}:",
        {"in": place, "rank": rank, "strategy": "fsdp"} | case,
    )
    for number, place in enumerate(LATE_IN)
    for shift, (kind, case) in enumerate(KINDS.items())
    for rank in ((number + shift) % 2,)
}
TWO_RANKS: Cases = FSDP | {
    "much to send for little to compute": (
        "synchronisation None None:", {"width": 1500, "depth": 6, "batch_size": 2},
    ),
    "much to send for little to compute under fsdp": (
        "synchronisation None None:", {"width": 1500, "depth": 6, "batch_size": 2, "strategy": "fsdp"},
    ),
    "equal ranks": ("compute None None:", {"equal_s": 0.03}),
    "equal ranks but for rank 0's validation": ("compute None None:", {"equal_s": 0.03, "in": "validation", "rank": 0}),
}  # fmt: skip
# Ranks meet in rows and columns of a mesh, and wait there for ranks that wait elsewhere.
FOUR_RANKS: Cases = {
    f"{place} in a mesh": (
        f"straggler {rank} {place}:",
        {"in": place, "rank": rank, "strategy": "fsdp_tensor_parallel"},
    )
    for place, rank in (("data", 2), ("other", 1))
}
ONE_RANK: Cases = {
    "a slow loader": ("input None None:", {"in": "data"}),
    "a large net": ("compute None None:", {"width": 1000, "depth": 4, "batch_size": 256}),
    "many small operations": ("host None None: 1", {"many_ops": 1000}),
    "slow callbacks": ("host None None:", {"in": "other"}),
    "a slow transfer": ("transfer None None:", {"in": "transfer"}),
}
CASES = {4: FOUR_RANKS, 3: DDP | MORE_DDP, 2: TWO_RANKS, 1: ONE_RANK}


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
                "cases": cases,
            }
            run = Run(tmp_path_factory.mktemp("ranks"), [], {}, started_at=time.time())
            told |= agent.run_ranks("fault_ranks:judge_cases", config, run, ranks).files
    return told


@pytest.mark.alone
@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_fault_is_named_with_its_rank_and_phase(name: str, verdicts: dict[str, str]) -> None:
    (expected,) = (cases[name][0] for cases in CASES.values() if name in cases)
    assert verdicts[name].startswith(expected), verdicts[name]


def test_ranks_and_diagnosis_are_in_tensorboard_by_default(run: Any) -> None:
    folder, _ = run("debug=none", "trainer.max_epochs=3", "trainer.devices=2", "trainer.accelerator=cpu",
                    "callbacks.tracker.interval_s=0.1", "trainer.enable_progress_bar=false")  # fmt: skip
    runs = sorted(path.name for path in (folder / "tensorboard").iterdir() if path.is_dir())
    assert runs == ["all", "rank_000", "rank_001"]
    assert "diagnosis" in (folder / "metrics.json").read_text()
