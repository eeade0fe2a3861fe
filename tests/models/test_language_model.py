"""The language model's metrics, samples of text and checkpoints."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn.functional import cross_entropy

from project.data import DataModule, TensorDataset
from project.models import LanguageModel


class Verses(DataModule):
    """25 blocks of 9 bytes: evaluation batches of 9 and fewer."""

    def setup(self, stage: str | None = None) -> None:
        text = torch.tensor(list(b"half a league, half a league, half a league onward, " * 5))
        self.train_set = self.val_set = self.test_set = TensorDataset({"tokens": text[: 25 * 9].view(25, 9)})


def language_model(**arguments: Any) -> LanguageModel:
    net = {
        "_target_": "project.models.nets.GPT",
        "vocab_size": 256,
        "context": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
    }
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.01}
    torch.manual_seed(0)
    return LanguageModel(**{"net": net, "optimizer": optimizer, "context": 8, "sample_bytes": 5} | arguments)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**quiet | {"default_root_dir": folder} | arguments)


def all_blocks() -> Tensor:
    datamodule = Verses()
    datamodule.setup()
    return datamodule.test_set.tensors["tokens"]  # type: ignore[union-attr]


def expected_metrics(model: LanguageModel, split: str) -> dict[str, float]:
    """By hand, over all predicted bytes at once."""
    blocks = all_blocks()
    with torch.no_grad():
        log_probabilities = model.eval()(blocks[:, :-1]).log_softmax(dim=-1)
    loss = -log_probabilities.gather(-1, blocks[:, 1:, None]).double().mean().item()
    return {f"{split}/loss": loss, f"{split}/bits_per_byte": loss / math.log(2), f"{split}/perplexity": math.exp(loss)}


def test_metrics_are_those_of_all_bytes_in_every_epoch(tmp_path: Path) -> None:
    model, datamodule = language_model(), Verses(batch_size=10)  # evaluated in batches of 9, 8 and 8
    run = trainer(tmp_path)
    run.fit(model, datamodule=datamodule)
    validated = {name: value.item() for name, value in run.callback_metrics.items()}
    assert validated == pytest.approx(expected_metrics(model, "val"), rel=1e-5)
    for _ in range(2):
        (tested,) = run.test(model, datamodule=datamodule, verbose=False)
        assert tested == pytest.approx(expected_metrics(model, "test"), rel=1e-5)


def test_uneven_batches_weigh_by_their_bytes() -> None:
    model = language_model()
    blocks = all_blocks()
    for batch in (blocks[:1], blocks[1:25, :4]):  # 8 bytes are predicted, then 72
        model.validation_step({"tokens": batch}, 0)
    with torch.no_grad():
        sums = [
            cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            for batch in (blocks[:1], blocks[1:25, :4])
        ]
    mean = (sum(sums) / 80).item()  # type: ignore[union-attr]
    computed = {name: value.item() for name, value in model.val_metrics.compute().items()}
    assert computed == pytest.approx(
        {"val/loss": mean, "val/bits_per_byte": mean / math.log(2), "val/perplexity": math.exp(mean)}, rel=1e-5
    )


def test_uniform_predictions_cost_eight_bits_per_byte() -> None:
    model = language_model()
    torch.nn.init.zeros_(model.net.embedding.tokens.weight)  # type: ignore[arg-type, union-attr]
    model.validation_step({"tokens": all_blocks()}, 0)
    computed = model.val_metrics.compute()
    assert computed["val/bits_per_byte"].item() == pytest.approx(8)
    assert computed["val/perplexity"].item() == pytest.approx(256)


def test_fitting_learns(tmp_path: Path) -> None:
    model = language_model()
    before = expected_metrics(model, "val")["val/loss"]
    trainer(tmp_path, max_epochs=20, limit_val_batches=0).fit(model.train(), datamodule=Verses(batch_size=25))
    assert expected_metrics(model, "val")["val/loss"] < before - 0.5


def test_prediction_gives_the_cost_of_each_block() -> None:
    model, blocks = language_model(), all_blocks()
    result = model.predict_step({"tokens": blocks}, 0)
    assert result["loss"].shape == (25,)
    loss = result["loss"].mean().item()
    assert loss == pytest.approx(expected_metrics(model, "test")["test/loss"], rel=1e-5)
    assert torch.allclose(result["bits_per_byte"] * math.log(2), result["loss"])


def test_generated_text_repeats_and_leaves_the_global_random_state_alone() -> None:
    model, prompt = language_model().train(), torch.tensor([[104, 97], [32, 97]])
    state = torch.random.get_rng_state()
    first = model.generate(prompt, 20)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.shape == (2, 22)
    assert torch.equal(first[:, :2], prompt)
    assert torch.equal(model.generate(prompt, 20), first)
    assert not torch.equal(model.generate(prompt, 20, generator=torch.Generator().manual_seed(1)), first)
    assert model.training


def test_text_is_drawn_from_the_likeliest_bytes() -> None:
    model, prompt = language_model(), torch.tensor([[104, 97]])
    greedy = model.generate(prompt, 12, temperature=0)
    assert torch.equal(model.generate(prompt, 12, top_k=1), greedy)
    assert torch.equal(model.generate(prompt, 12, temperature=1e-4), greedy)
    assert greedy[0, 2] == model(prompt)[0, -1].argmax()
    likeliest = model(prompt)[0, -1].topk(3).indices.tolist()
    many = model.generate(prompt.expand(200, 2), 1, temperature=5.0, top_k=3)[:, -1]
    assert set(many.tolist()) == set(likeliest)


@pytest.mark.parametrize("arguments", [{"temperature": -1.0}, {"top_k": 0}])
def test_impossible_draws_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        language_model().generate(torch.tensor([[1]]), 1, **arguments)


@pytest.mark.parametrize("arguments", [{"prompt": ""}, {"sample_bytes": -1}])
def test_impossible_samples_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"model.{next(iter(arguments))}"):
        language_model(**arguments)


def test_text_is_written_into_tensorboard_after_training_and_test(tmp_path: Path) -> None:
    model = language_model(prompt="half\n")
    run = trainer(tmp_path, logger=TensorBoardLogger(tmp_path, name="", version=""))
    run.fit(model, datamodule=Verses(batch_size=10))
    run.test(model, datamodule=Verses(batch_size=10), verbose=False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for stage in ("train", "test"):
        (sample,) = events.Tensors(f"{stage}/sample/text_summary")
        assert sample.tensor_proto.string_val[0].decode().startswith("    half\n    ")
        assert sample.step == 4
    assert len(events.Scalars("val/bits_per_byte")) == 2


@pytest.mark.parametrize("compile_net", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoint_is_plain_data_and_rebuilds_the_model(tmp_path: Path, compile_net: bool) -> None:
    model = language_model(compile=compile_net, scheduler={"_target_": "torch.optim.lr_scheduler.ConstantLR"})
    run = trainer(tmp_path, limit_train_batches=0, limit_val_batches=0)
    run.fit(model, datamodule=Verses(batch_size=5))
    run.save_checkpoint(tmp_path / "model.ckpt")
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(language_model().state_dict())
    assert not any("rotary" in name for name in checkpoint["state_dict"])
    assert checkpoint["hyper_parameters"]["net"]["_target_"] == "project.models.nets.GPT"
    rebuilt = LanguageModel.load_from_checkpoint(tmp_path / "model.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), rebuilt.parameters(), strict=True))
    assert rebuilt.net.head.weight is rebuilt.net.embedding.tokens.weight  # type: ignore[union-attr]
