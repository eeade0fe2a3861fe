"""Weights that are set to zero while the net trains: how many, which, and what checkpoints hold of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from project.compression.pruning import Pruning
from project.config.composition import config_folder
from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError
from project.launch.job import run_job
from project.launch.resume import compose_resumed
from project.launch.stopping import Stopped
from project.strategies.weight_averaging import WeightAveraging
from small_classifier import Classifier, loader, mlp, quiet_trainer

SIZES = [16] * 10
QUIET = (
    "debug=none", "callbacks=pruning", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false", "trainer.max_epochs=4",
)  # fmt: skip


class Zeros(Callback):
    """Notes the share of zeros that the net computes with, in each batch."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.shares.append(zeros_of([part.weight for part in matrices(pl_module)]))


def matrices(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def zeros_of(weights: list[Tensor]) -> float:
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def trained(pruning: Pruning, *callbacks: Callback, module: Classifier | None = None, **arguments: Any) -> Classifier:
    torch.manual_seed(0)
    module = module or Classifier(mlp())
    quiet_trainer(1, "auto", callbacks=[pruning, *callbacks], **arguments).fit(module, loader(SIZES))
    return module


def test_share_of_zeros_grows_in_rounds_and_stays() -> None:
    zeros = Zeros()
    module = trained(Pruning(amount=0.8, begin=0.2, end=0.8, rounds=3), zeros)
    after = [0.8 * (1 - (1 - k / 3) ** 3) for k in (1, 2, 3)]
    expected = [0.0] + 3 * [after[0]] + 3 * [after[1]] + 3 * [after[2]]
    assert zeros.shares == pytest.approx(expected, abs=0.002)
    assert zeros_of([part.weight for part in matrices(module)]) == pytest.approx(0.8, abs=0.002)


def test_smallest_go_first_and_biases_and_norms_stay() -> None:
    torch.manual_seed(1)
    module = Classifier(mlp())
    before = torch.cat([part.weight.detach().abs().ravel() for part in matrices(module)])
    trained(Pruning(amount=0.5, begin=0.0, end=0.1, rounds=1), module=module, max_steps=1)
    after = torch.cat([part.weight.detach().ravel() for part in matrices(module)])
    assert before[after == 0].max() < before[after != 0].min()
    assert all(bool((part.bias != 0).all()) for part in matrices(module))
    assert module.state_dict().keys() == Classifier(mlp()).state_dict().keys()


def test_pruning_is_refused_where_it_can_not_be() -> None:
    with pytest.raises(UserError, match="amount=1.5 can't be"):
        Pruning(amount=1.5)
    with pytest.raises(UserError, match="begin=0.7 and callbacks.pruning.end=0.2 can't be"):
        Pruning(begin=0.7, end=0.2)
    with pytest.raises(UserError, match="rounds=0 can't be"):
        Pruning(rounds=0)
    with pytest.raises(UserError, match="pruning_fn=ln_structured can't be"):
        Pruning(pruning_fn="ln_structured")
    with pytest.raises(UserError, match="an average of the weights can't be combined"):
        trained(Pruning(), WeightAveraging())
    with pytest.raises(UserError, match="whose end is not known"):
        trained(Pruning(), max_epochs=-1, max_time="00:00:00:01")
    with pytest.raises(UserError, match="has no layer whose weights could be pruned"):
        trained(Pruning(), module=Classifier(nn.Sequential(nn.LayerNorm(6))))


def weights_of(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_checkpoints_are_plain_and_can_be_evaluated(run: Any, devices: int) -> None:
    folder, metrics = run(*QUIET, f"trainer.devices={devices}")
    for name in ("best", "last"):
        path = folder / "checkpoints" / f"{name}.ckpt"
        state = weights_of(path)
        assert not [key for key in state if key.endswith(("_orig", "_mask"))]
        assert zeros_of([value for key, value in state.items() if key.endswith("weight")]) == pytest.approx(
            0.5, abs=1e-3
        )
    evaluated = evaluate(run, folder / "checkpoints" / "best.ckpt")
    assert evaluated == pytest.approx({name: value for name, value in metrics.items() if name in evaluated})
    assert "test/accuracy" in evaluated


def evaluate(run: Any, path: Path) -> dict[str, float]:
    typed = f"ckpt_path={path}"
    config = compose_from_checkpoint("evaluate", ["evaluate", typed])
    metrics: dict[str, float] = run(typed, command="evaluate", config=config)[1]
    return metrics


@pytest.mark.slow
def test_ranks_prune_the_same_at_random_too(run: Any) -> None:
    """Or their weights would drift apart, and the numbers with them."""
    random = (*QUIET, "callbacks.pruning.pruning_fn=random_unstructured", "trainer.devices=2")
    folder, metrics = run(*random)
    assert evaluate(run, folder / "checkpoints" / "last.ckpt")["test/loss"] == pytest.approx(
        metrics["test/loss"], abs=1e-5
    )


@pytest.mark.slow
def test_strategy_that_spreads_the_model_is_refused(run: Any) -> None:
    with pytest.raises(UserError, match="callbacks=pruning needs the whole model in each process"):
        run(*QUIET, "trainer/strategy=fsdp", "trainer.devices=2")


@pytest.mark.slow
def test_stopped_run_goes_on_with_its_masks(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between two rounds, it ends with the weights of a run that was not."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    whole, _ = run(*QUIET, "test=false")
    folder = tmp_path / "run"
    stop = ("+callbacks.stop._target_=pruning_stop.Stop", "+callbacks.stop.after=27")
    with pytest.raises(Stopped):
        run(*QUIET, "test=false", *stop, f"paths.run_dir={folder}")
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 27
    assert 0.1 < zeros_of([value for name, value in state["state_dict"].items() if name.endswith("weight")]) < 0.49
    resume(folder, "callbacks.stop=null")
    expected, found = (weights_of(path / "checkpoints" / "last.ckpt") for path in (whole, folder))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def resume(folder: Path, *overrides: str) -> None:
    typed = [f"resume={folder}", *overrides]
    config = compose_resumed("train", ["train", *typed])
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose(config, typed)
    run_job("project.train:train", composed, typed)
