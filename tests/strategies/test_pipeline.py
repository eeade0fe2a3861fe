"""The pipeline strategy on real ranks of the CPU."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comparison import largest_difference
from project.errors import UserError
from project.launch import agent
from project.launch.run import Run

Metrics = dict[str, float]
Ranks = tuple[int, int]  # how many, and of those in a pipeline
Case = Callable[[str, Ranks | None], tuple[Path, Metrics]]
pytestmark = pytest.mark.timeout(240)
slow = pytest.mark.slow

TWO, FOUR, TWICE_TWO = (2, 2), (4, 4), (4, 2)
SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.003, "foreach": True}
CLIPPED = {"max_steps": 20, "gradient_clip_val": 0.1}
MLP_SGD = {"net": "mlp", "optimizer": SGD, "trainer_arguments": CLIPPED}

# Functions of pipeline_ranks.py with their config, and the ranks that run them; None is one device without strategy.
CASES: dict[str, tuple[list[Ranks | None], str, dict[str, Any]]] = {
    "1f1b": ([None, TWO, FOUR, TWICE_TWO], "train", MLP_SGD),
    "gpipe": ([TWO, TWICE_TWO], "train", MLP_SGD | {"strategy": {"schedule": "gpipe", "micro_batches": 4}}),
    "interleaved": ([TWO, TWICE_TWO], "train", MLP_SGD | {"strategy": {"schedule": "interleaved"}}),
    "adamw": ([None, TWO, FOUR], "train", MLP_SGD | {"optimizer": ADAMW, "ema": True}),
    "gpt": (
        [None, TWO, TWICE_TWO],
        "train",
        {"net": "gpt", "net_arguments": {"tie_weights": False}, "optimizer": ADAMW}
        | {"trainer_arguments": CLIPPED | {"max_steps": 10}},
    ),
    "bf16": (
        [None, TWO],
        "train",
        {"net": "mlp", "optimizer": SGD, "trainer_arguments": {"max_steps": 10, "precision": "bf16-mixed"}},
    ),
    "batch_norm": ([TWO, TWICE_TWO], "train", {"net": "cnn", "optimizer": SGD, "trainer_arguments": {"max_steps": 4}}),
    "accumulate": ([TWO, TWICE_TWO], "accumulate", {"net": "mlp", "optimizer": SGD}),
    "cycle": ([TWO, TWICE_TWO], "cycle", {"net": "mlp", "optimizer": ADAMW}),
    "log": ([None, TWO, TWICE_TWO], "log", {}),
    "draw": ([TWO, TWICE_TWO], "draw", {}),
}


def launch(folder: Path, ranks: Ranks | None, cases: dict[str, dict[str, Any]]) -> None:
    """Run functions of pipeline_ranks.py, one after the other, on the same ranks."""
    world_size, size = ranks or (1, 1)
    for case in cases.values():
        given = case.get("strategy", {})
        stages = size * (2 if given.get("schedule") == "interleaved" else 1)
        case["strategy"] = {"stages": stages} | given
    config = {
        "launch": {"threads_per_rank": 1, "timeout_s": 60},
        "trainer": {"accelerator": "cpu", "devices": world_size},
        "cases": cases,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        agent.run_ranks("pipeline_ranks:run_cases", config, Run(folder, [], {}, started_at=time.time()), world_size)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """``case("1f1b", (2, 2))``: folder and metrics; all cases of the same ranks are run together, once."""
    agent.warm_up()
    folders: dict[Ranks | None, Path] = {}

    def result(name: str, ranks: Ranks | None) -> tuple[Path, Metrics]:
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp("ranks")
            cases = {
                case: {"function": function} | config
                for case, (layouts, function, config) in CASES.items()
                if ranks in layouts
            }
            launch(folders[ranks], ranks, cases)
        folder = folders[ranks] / name
        return folder, json.loads((folder / "metrics.json").read_text())

    return result


def weights(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return state


def facts_of_ranks(folder: Path, ranks: Ranks) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in range(ranks[0])]


@slow
@pytest.mark.parametrize(
    ("ranks", "name", "like"),
    [
        (TWO, "1f1b", "1f1b"),
        (TWO, "gpipe", "1f1b"),
        (TWO, "interleaved", "1f1b"),
        (TWO, "adamw", "adamw"),
        (TWO, "gpt", "gpt"),
        (FOUR, "1f1b", "1f1b"),
        (FOUR, "adamw", "adamw"),
        (TWICE_TWO, "1f1b", "1f1b"),
        (TWICE_TWO, "gpipe", "1f1b"),
        (TWICE_TWO, "interleaved", "1f1b"),
        (TWICE_TWO, "gpt", "gpt"),
    ],
)
def test_weights_metrics_and_gradient_norm_are_those_of_one_device(
    case: Case, ranks: Ranks, name: str, like: str
) -> None:
    one, many = case(like, None), case(name, ranks)
    assert largest_difference(weights(one[0]), weights(many[0])) <= 1e-10
    assert {"train/grad_norm", "val/loss", "test/loss"} <= one[1].keys()
    for metric, value in one[1].items():
        assert many[1][metric] == pytest.approx(value, abs=1e-12, rel=0), metric


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_all_ranks_know_the_same_metrics_and_hold_their_stage_only(case: Case, ranks: Ranks) -> None:
    facts = facts_of_ranks(case("1f1b", ranks)[0], ranks)
    assert all(rank["metrics"] == facts[0]["metrics"] for rank in facts)
    assert [rank["first_with_its_data"] for rank in facts] == [1.0, 0.0] * (ranks[0] // 2)
    assert sum(rank["share"] for rank in facts) == pytest.approx(ranks[0] // ranks[1])
    assert all(rank["share"] < 0.75 for rank in facts)


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_accumulating_four_batches_equals_one_of_four_times_the_size(case: Case, ranks: Ranks) -> None:
    assert case("accumulate", ranks)[1]["difference"] <= 1e-10


@slow
def test_bf16_mixed_trains_close_to_one_device(case: Case) -> None:
    difference = largest_difference(weights(case("bf16", None)[0]), weights(case("bf16", TWO)[0]))
    assert 0 < difference <= 0.05  # sums are rounded to bf16, which has three digits


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_a_run_is_resumed_where_it_stopped_by_pipelines_and_by_one_device(
    case: Case, ranks: Ranks, tmp_path: Path
) -> None:
    folder, facts = case("cycle", ranks)
    assert facts["resumed"] <= 1e-12
    last = folder / "half" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    parameters = [name for name in checkpoint["state_dict"] if name.startswith("net.")]
    state = checkpoint["optimizer_states"][0]["state"]
    assert list(state) == list(range(len(parameters)))
    assert all(state[i]["exp_avg"].shape == checkpoint["state_dict"][name].shape for i, name in enumerate(parameters))
    resume = {"function": "resume", "ckpt_path": str(last)} | CASES["cycle"][2]
    launch(tmp_path, None, {"resume": resume})
    assert largest_difference(weights(folder), weights(tmp_path / "resume")) <= 1e-10


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_what_the_last_rank_logs_and_counts_is_logged_by_all_and_each_row_once(case: Case, ranks: Ranks) -> None:
    one, many = case("log", None)[1], case("log", ranks)[1]
    assert many["ranks_agree"] == 1
    assert (many["all"], many["not_all"]) == (1, 0)
    assert (many["by_metric"], many["by_log"], many["train/rows"]) == (11, 11, 40)
    assert many["seen"] == 80 * ranks[1] / ranks[0]  # each pipeline counts its share
    for name in ("train/accuracy", "train/logged_loss", "train/mean"):
        assert many[name] == pytest.approx(one[name], abs=1e-6), name  # metrics count in float32


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_the_step_draws_alike_on_the_ranks_of_a_pipeline_and_anew_in_each_micro_batch(case: Case, ranks: Ranks) -> None:
    _, facts = case("draw", ranks)
    assert facts["lost"] <= 1e-12
    assert facts["most"] - facts["least"] > 0.5
    drawn = [facts[f"drawn_{rank}"] for rank in range(ranks[0])]
    assert len(set(drawn)) == len(drawn)  # their dropout is their own


@slow
@pytest.mark.parametrize("ranks", [TWO, TWICE_TWO])
def test_batch_norm_is_evaluated_as_it_is_saved(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    folder, trained = case("batch_norm", ranks)
    saved = {"function": "evaluate", "net": "cnn", "optimizer": SGD, "weights": str(folder / "weights.pt")}
    launch(tmp_path, None, {"saved": saved})
    evaluated = json.loads((tmp_path / "saved" / "metrics.json").read_text())
    assert trained["test/loss"] == pytest.approx(evaluated["test/loss"], abs=1e-12, rel=0)


@slow
def test_a_step_that_only_the_last_rank_can_judge_is_told_to_the_user(tmp_path: Path) -> None:
    agent.warm_up()
    with pytest.raises(UserError, match="TwoCalls.training_step calls net more than once.*trainer/strategy=fsdp"):
        launch(tmp_path, TWO, {"fail": {"function": "fail"}})
