"""FSDP, tensor parallel and both, on real ranks of the CPU."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comparison import largest_difference
from project.errors import UserError
from project.launch import agent
from project.launch.run import Run
from project.strategies.checkpoint_files import CHECKSUMS, damage

Metrics = dict[str, float]
Ranks = tuple[int, int]  # how many, and of those in a group of tensor parallel
Case = Callable[[str, Ranks | None], tuple[Path, Metrics]]
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

FSDP, TENSOR, BOTH = (2, 1), (2, 2), (4, 2)
LAYOUTS = [FSDP, TENSOR, BOTH]
SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9}
PLAIN_SGD = {"_target_": "torch.optim.SGD"}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.003}
CLIPPED = {"max_steps": 20, "gradient_clip_val": 0.1}
BF16 = {"max_steps": 10, "precision": "bf16-mixed"}

# Functions of sharded_ranks.py with their config, and the ranks that run them; None is one device without strategy.
CASES: dict[str, tuple[list[Ranks | None], str, dict[str, Any]]] = {
    "sgd": (
        [None, (1, 1), FSDP, TENSOR, BOTH, (4, 1), (4, 4)],
        "train",
        {"net": "mlp", "optimizer": SGD, "trainer_arguments": CLIPPED},
    ),
    "adamw": ([None, FSDP, TENSOR, BOTH], "train", {"net": "mlp", "optimizer": ADAMW, "trainer_arguments": CLIPPED}),
    "gpt": (
        [None, FSDP, TENSOR, BOTH],
        "train",
        {"net": "gpt", "optimizer": ADAMW, "trainer_arguments": CLIPPED | {"max_steps": 10}},
    ),
    "bf16": ([None, FSDP, TENSOR], "train", {"net": "mlp", "optimizer": SGD, "trainer_arguments": BF16}),
    "accumulate": ([FSDP, TENSOR, BOTH], "accumulate", {"net": "mlp", "optimizer": SGD}),
    "cycle_adamw": ([FSDP, BOTH], "cycle", {"net": "mlp", "optimizer": ADAMW}),
    "cycle_plain_sgd": ([TENSOR], "cycle", {"net": "mlp", "optimizer": PLAIN_SGD}),
    "cycle_single": ([FSDP], "cycle", {"net": "mlp", "optimizer": SGD, "strategy": {"save": "single"}}),
    "background": ([FSDP, TENSOR, BOTH], "background", {"net": "mlp", "optimizer": ADAMW}),
    "count": ([TENSOR, BOTH], "count", {}),
    "drop": ([TENSOR, BOTH], "drop", {"net": "gpt", "net_arguments": {"dropout": 0.5}, "optimizer": ADAMW}),
    "overflow": ([FSDP, TENSOR, BOTH], "overflow", {"net": "gpt", "optimizer": PLAIN_SGD}),
    "own": ([FSDP], "own", {}),
}
CYCLES = [(name, ranks) for name, (layouts, function, _) in CASES.items() if function == "cycle" for ranks in layouts]


def launch(folder: Path, ranks: Ranks | None, cases: dict[str, dict[str, Any]]) -> None:
    """Run functions of sharded_ranks.py, one after the other, on the same ranks."""
    world_size, size = ranks or (1, 1)
    for case in cases.values():
        if ranks and case.get("strategy") != "ddp":
            case["strategy"] = {"tensor_parallel_size": size} | case.get("strategy", {})
    config = {
        "launch": {"threads_per_rank": 1, "timeout_s": 60},
        "trainer": {"accelerator": "cpu", "devices": world_size},
        "cases": cases,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        agent.run_ranks("sharded_ranks:run_cases", config, Run(folder, [], {}, started_at=time.time()), world_size)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """``case("sgd", (2, 1))``: folder and metrics; all cases of the same ranks are run together, once."""
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return state


def assert_equal(one: tuple[Path, Metrics], many: tuple[Path, Metrics]) -> None:
    assert largest_difference(weights(one[0]), weights(many[0])) <= 1e-10
    for name, value in one[1].items():
        assert many[1][name] == pytest.approx(value, abs=1e-12, rel=0), name


@pytest.mark.parametrize("name", ["sgd", "adamw", "gpt"])  # gpt: tied weights, activation checkpoints
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_weights_metrics_and_gradient_norm_are_those_of_one_device(case: Case, ranks: Ranks, name: str) -> None:
    one, many = case(name, None), case(name, ranks)
    assert {"train/grad_norm", "val/loss", "test/loss"} <= one[1].keys()
    assert_equal(one, many)


@pytest.mark.parametrize("ranks", [(4, 1), (4, 4)])
def test_four_ranks_train_as_one_device(case: Case, ranks: Ranks) -> None:
    assert_equal(case("sgd", None), case("sgd", ranks))


def test_one_rank_trains_as_without_the_strategy(case: Case) -> None:
    assert_equal(case("sgd", None), case("sgd", (1, 1)))


@pytest.mark.parametrize("ranks", [FSDP, TENSOR])
def test_every_parameter_is_spread_and_each_rank_holds_its_share(case: Case, ranks: Ranks) -> None:
    folder, _ = case("sgd", ranks)
    facts = [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["all_spread"] for rank in facts)
    assert [rank["first_with_its_data"] for rank in facts] == [1.0, 1.0 if ranks == FSDP else 0.0]
    assert all(0.4 < rank["share"] < 0.75 for rank in facts)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_accumulating_four_batches_equals_one_of_four_times_the_size(case: Case, ranks: Ranks) -> None:
    assert case("accumulate", ranks)[1]["difference"] <= 1e-10


@pytest.mark.parametrize("ranks", [FSDP, TENSOR])
def test_bf16_mixed_trains_close_to_one_device(case: Case, ranks: Ranks) -> None:
    difference = largest_difference(weights(case("bf16", None)[0]), weights(case("bf16", ranks)[0]))
    assert 0 < difference <= 0.05  # partial sums are rounded to bf16, which has three digits


@pytest.mark.parametrize(("name", "ranks"), CYCLES)
def test_checkpoints_test_and_resume_alike_before_and_after_they_are_one_file(
    case: Case, name: str, ranks: Ranks, tmp_path: Path
) -> None:
    folder, facts = case(name, ranks)
    assert facts["folders"] == float(name != "cycle_single")
    assert facts["test_after"] == facts["test_before"]
    assert facts["saved"] == 0
    assert facts["resumed_before"] <= 1e-12
    assert facts["resumed_after"] <= 1e-12
    # Of the shards nothing is left, and one device goes on where the ranks stopped.
    assert sorted(path.name for path in (folder / "half").iterdir()) == ["best.ckpt", "last.ckpt"]
    last = folder / "half" / "last.ckpt"
    assert torch.load(last, weights_only=True)["config"] == {"seed": 0}
    config = CASES[name][2]
    resume = {"function": "resume", "net": config["net"], "optimizer": config["optimizer"], "ckpt_path": str(last)}
    launch(tmp_path, None, {"resume": resume})
    assert largest_difference(weights(folder), weights(tmp_path / "resume")) <= 1e-10


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_shards_written_in_the_background_are_those_of_their_moment(case: Case, ranks: Ranks) -> None:
    folder, facts = case("background", ranks)
    assert facts == {"complete": 1, "went_on": 1, "raised": 1, "told": 1}
    sums = {}
    for name in ("at_once", "meanwhile", "end"):
        assert damage(folder / f"{name}.ckpt") is None
        sums[name] = json.loads((folder / f"{name}.ckpt" / CHECKSUMS).read_text())
        del sums[name][".metadata"]  # which has an identity of its own
    assert sums["meanwhile"] == sums["at_once"] != sums["end"]
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("ranks", [TENSOR, BOTH])
def test_each_row_is_counted_once_and_decisions_are_of_all_ranks(case: Case, ranks: Ranks) -> None:
    _, facts = case("count", ranks)
    assert facts == {"by_metric": 11, "by_log": 11, "all": 1, "not_all": 0, "any": 1}


def test_ranks_of_one_tensor_parallel_group_drop_the_same(case: Case) -> None:
    _, facts = case("drop", TENSOR)
    assert facts["apart"] == 0
    assert facts["drawn_0"] == facts["drawn_1"]


def test_groups_of_tensor_parallel_drop_differently(case: Case) -> None:
    _, facts = case("drop", BOTH)
    assert facts["drawn_0"] == facts["drawn_1"] != facts["drawn_2"] == facts["drawn_3"]


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_step_whose_gradients_overflow_on_one_rank_is_left_out_by_all(case: Case, ranks: Ranks) -> None:
    assert set(case("overflow", ranks)[1].values()) == {2.0}  # half of the scale before


def test_a_module_that_shards_itself_is_left_as_it_is(case: Case) -> None:
    assert case("own", FSDP)[1]["sharded"] == 1


def test_batch_norm_trains_as_under_ddp_and_is_evaluated_as_it_is_saved(tmp_path: Path) -> None:
    config = {"function": "train", "net": "cnn", "optimizer": SGD, "trainer_arguments": {"max_steps": 4}}
    launch(tmp_path, FSDP, {"ddp": config | {"strategy": "ddp"}, "fsdp": config})
    ddp, fsdp = weights(tmp_path / "ddp"), weights(tmp_path / "fsdp")
    assert any("running_mean" in name for name in fsdp)
    assert largest_difference(ddp, fsdp) <= 1e-10
    saved = {"function": "evaluate", "net": "cnn", "optimizer": SGD, "weights": str(tmp_path / "fsdp" / "weights.pt")}
    launch(tmp_path, None, {"saved": saved})
    trained = json.loads((tmp_path / "fsdp" / "metrics.json").read_text())
    evaluated = json.loads((tmp_path / "saved" / "metrics.json").read_text())
    assert trained["test/loss"] == pytest.approx(evaluated["test/loss"], abs=1e-12, rel=0)


@pytest.mark.parametrize("ranks", [FSDP, TENSOR])
def test_a_compiled_net_trains_as_on_one_device(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    launch(tmp_path, ranks, {"compiled": {"function": "train", "compile": "aot_eager"} | CASES["sgd"][2]})
    assert largest_difference(weights(case("sgd", None)[0]), weights(tmp_path / "compiled")) <= 1e-10


def test_what_a_rank_refuses_reaches_the_user(tmp_path: Path) -> None:
    agent.warm_up()
    with pytest.raises(UserError, match="ResidualCNN can't be split by tensor parallel.*trainer/strategy=fsdp"):
        launch(tmp_path, TENSOR, {"fail": {"function": "fail", "net": "cnn", "optimizer": SGD}})
