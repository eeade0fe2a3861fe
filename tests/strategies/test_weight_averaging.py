"""The moving average of the weights: what it is, where it is used, and that the strategy does not matter."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from comparison import Run, largest_difference, weights
from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError
from project.launch import agent
from project.launch.run import Run as RunOfRank
from project.strategies.weight_averaging import TRAINING_WEIGHTS, WeightAveraging

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Counter(L.LightningModule):
    """Its weight is the number of steps behind it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=dtype))
        self.register_buffer("seen", torch.zeros((), dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.validated: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 10
        self.count += 1
        return -self.weight

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append((self.weight.item(), self.seen.item()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(4), batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def averages(values: list[float], decay: float, start_step: int = 0) -> list[float]:
    """By the formula: the average after each step over weights that begin at 0."""
    average, result = 0.0, []
    for step, value in enumerate(values):
        n = step - start_step
        kept = 0.0 if n < 0 else min(decay, (1 + n) / (10 + n))
        average = kept * average + (1 - kept) * value
        result.append(average)
    return result


def fit(folder: Path, averaging: WeightAveraging, model: Counter, *callbacks: Callback, **more: Any) -> L.Trainer:
    arguments = {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1, "val_check_interval": 1}
    trainer = L.Trainer(default_root_dir=folder, callbacks=[averaging, *callbacks], **(QUIET | arguments | more))
    trainer.fit(model)
    return trainer


@pytest.mark.parametrize(("decay", "start_step"), [(0.999, 0), (0.2, 0), (0.999, 2)])
def test_validation_sees_the_average_and_training_goes_on_with_its_own_weights(
    tmp_path: Path, decay: float, start_step: int
) -> None:
    model = Counter()
    fit(tmp_path, WeightAveraging(decay, start_step), model, enable_checkpointing=False)
    expected = averages([1.0, 2.0, 3.0, 4.0], decay, start_step)
    assert model.validated == [(0, 0), *(pytest.approx((value, 10 * value)) for value in expected)]
    # After training the model holds the average, so that a test without a checkpoint uses it too.
    assert model.weight.item() == pytest.approx(expected[-1])
    assert model.count.item() == 4


def test_accumulated_batches_make_one_step_of_the_average(tmp_path: Path) -> None:
    model = Counter()
    fit(tmp_path, WeightAveraging(), model, enable_checkpointing=False, accumulate_grad_batches=2)
    assert model.weight.item() == pytest.approx(averages([1.0, 2.0], 0.999)[-1])


def test_checkpoints_hold_the_average_beside_the_weights_to_go_on_with(tmp_path: Path) -> None:
    every_step = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = fit(tmp_path, WeightAveraging(0.2), Counter(), every_step)
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # when the model holds the average
    for name, step in (("step=1", 1), ("step=2", 2), ("step=4", 4), ("after", 4)):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        expected = averages([1.0, 2.0, 3.0, 4.0], 0.2)[step - 1]
        assert checkpoint["state_dict"]["weight"].item() == pytest.approx(expected), name
        assert checkpoint[TRAINING_WEIGHTS]["weight"].item() == step, name


def test_weights_of_three_digits_have_an_average_of_seven(tmp_path: Path) -> None:
    model = Counter(torch.bfloat16)
    model.weight.data.fill_(100)
    averaging = WeightAveraging()
    fit(tmp_path, averaging, model, enable_checkpointing=False)
    assert averaging._averages is not None
    expected = 100 + averages([1.0, 2.0, 3.0, 4.0], 0.999)[-1]
    assert averaging._averages[0].item() == pytest.approx(expected, abs=1e-4)
    assert model.weight.item() == pytest.approx(expected, abs=0.5)


def test_a_run_without_averages_can_go_on_with_them(tmp_path: Path) -> None:
    every_step = ModelCheckpoint(tmp_path, "plain", every_n_train_steps=4)
    L.Trainer(default_root_dir=tmp_path, callbacks=[every_step], max_epochs=1, limit_val_batches=0, **QUIET).fit(
        Counter()
    )
    model = Counter()
    trainer = L.Trainer(
        default_root_dir=tmp_path, callbacks=[WeightAveraging(0.5)], max_epochs=2, limit_val_batches=0, **QUIET
    )
    trainer.fit(model, ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    average = 4.0
    for step in range(4):
        kept = min(0.5, (1 + step) / (10 + step))
        average = kept * average + (1 - kept) * (5 + step)
    assert model.weight.item() == pytest.approx(average)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [({"decay": 1.0}, "type callbacks.ema.decay=0.999"), ({"start_step": -1}, "type callbacks.ema.start_step=0")],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        WeightAveraging(**arguments)


def test_checkpoints_of_the_weights_alone_are_refused(tmp_path: Path) -> None:
    alone = ModelCheckpoint(tmp_path, save_weights_only=True)
    with pytest.raises(UserError, match="leave out save_weights_only=true, or type callbacks=default"):
        fit(tmp_path, WeightAveraging(), Counter(), alone)


EXPERIMENT = (
    "experiment=digits_mlp",
    "optimizer=sgd",
    "optimizer.momentum=0.9",
    "model.net.width=32",
    "trainer.accelerator=cpu",
    "trainer.precision=64-true",
    "trainer.max_steps=20",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "callbacks=ema",
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp", "tensor_parallel", "ddp_local_sgd"])
def test_averages_and_metrics_are_those_of_one_device(run: Run, strategy: str) -> None:
    one, one_metrics = run(*EXPERIMENT)
    many, many_metrics = run(*EXPERIMENT, f"trainer/strategy={strategy}", "trainer.devices=2")
    assert largest_difference(weights(one), weights(many)) <= 1e-10
    assert largest_difference(training_weights(one), training_weights(many)) <= 1e-10
    for name, value in one_metrics.items():
        assert many_metrics[name] == pytest.approx(value, abs=1e-9), name


def training_weights(folder: Path) -> dict[str, Tensor]:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    state: dict[str, Tensor] = checkpoint[TRAINING_WEIGHTS]
    return state


@pytest.mark.slow
def test_averaging_changes_what_is_tested_and_not_what_is_trained(run: Run) -> None:
    averaged, averaged_metrics = run(*EXPERIMENT)
    plain, plain_metrics = run(*EXPERIMENT, "callbacks=default")
    assert largest_difference(training_weights(averaged), weights(plain)) == 0
    assert largest_difference(weights(averaged), weights(plain)) > 1e-3
    assert averaged_metrics["test/loss"] != plain_metrics["test/loss"]


@pytest.mark.slow
def test_averages_of_ranks_that_train_apart_are_averaged(run: Run) -> None:
    one, _ = run(*EXPERIMENT)
    apart = ("trainer/strategy=ddp_local_sgd", "trainer.strategy.start_step=4", "trainer.devices=2")
    many, metrics = run(*EXPERIMENT, *apart)
    assert 1e-6 < largest_difference(weights(one), weights(many)) < 0.2
    assert evaluated(run, many)["test/loss"] == pytest.approx(metrics["test/loss"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("trainer/strategy=fsdp", "trainer.devices=2")])
def test_a_checkpoint_is_evaluated_by_its_averages(run: Run, options: tuple[str, ...]) -> None:
    folder, metrics = run(*EXPERIMENT, *options)
    assert evaluated(run, folder)["test/loss"] == pytest.approx(metrics["test/loss"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "dp", "fsdp"])
def test_statistics_of_batch_norm_are_averaged_and_saved_as_they_are_validated(run: Run, strategy: str) -> None:
    typed = (*EXPERIMENT, "model/net=residual_cnn", "model.net.width=4", "model.net.blocks=1", "trainer.max_steps=6")
    typed = tuple(text for text in typed if text not in ("experiment=digits_mlp", "model.net.width=32"))
    folder, metrics = run(*typed, f"trainer/strategy={strategy}", "trainer.devices=2", "test=false")
    assert evaluated(run, folder, "split=val")["val/loss"] == pytest.approx(metrics["val/loss"], abs=1e-12)
    averaged, trained = weights(folder), training_weights(folder)
    statistics = [name for name in averaged if name.endswith("running_var")]
    assert all((averaged[name] - trained[name]).abs().max() > 1e-6 for name in statistics)


def evaluated(run: Run, folder: Path, *options: str) -> dict[str, float]:
    checkpoint = f"ckpt_path={folder}/checkpoints/best.ckpt"
    name = compose_from_checkpoint("evaluate", ["evaluate", checkpoint])
    return run(checkpoint, "trainer.accelerator=cpu", *options, command="evaluate", config=name)[1]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_weights_and_averages(tmp_path: Path) -> None:
    facts: dict[str, float] = {}
    for ranks, strategies in ((1, ["dp"]), (2, ["ddp", "fsdp", "tensor_parallel", "single_file"])):
        config: dict[str, Any] = {
            "launch": {"threads_per_rank": 1, "timeout_s": 60},
            "trainer": {"accelerator": "cpu", "devices": ranks},
            "strategies": strategies,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(Path(__file__).parent)
            folder = RunOfRank(tmp_path, [], {}, started_at=time.time())
            facts |= agent.run_ranks("combination_models:resume_averages", config, folder, ranks).metrics
    assert len(facts) == 3 * 5
    for name, difference in facts.items():
        if name.endswith("apart"):
            assert difference > 1e-3, name
        else:
            assert difference <= 1e-12, name
