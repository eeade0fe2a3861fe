"""What TensorBoard reads of a run."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.tracking.tensorboard import RunLogger

CONFIG = {"name": "mine", "optimizer": {"lr": 0.1, "betas": [0.9, 0.999]}, "scheduler": None}
HPARAMS = {"optimizer.lr": 0.1, "trainer.devices": 2, "compile": True, "optimizer": "AdamW", "scheduler": "none"}


class Model(L.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)
        self.fails = fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fails:
            raise RuntimeError("boom")
        loss: Tensor = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/loss", 0.25)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(folder: Path, fails: bool = False) -> EventAccumulator:
    """Fit and test as the command does, and read the events back."""
    logger = RunLogger(str(folder))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, log_every_n_steps=1, logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    logger.start_run(CONFIG, {"host": "here"}, HPARAMS)
    data: DataLoader[Tensor] = DataLoader(torch.randn(4, 1), batch_size=2)  # type: ignore[arg-type]
    model = Model(fails)
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(model, data)
    else:
        trainer.fit(model, data)
        trainer.test(model, data, verbose=False)
        logger.finish_run()
    return EventAccumulator(str(folder / "tensorboard")).Reload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def events(folder: Path) -> EventAccumulator:
    return run(folder)


def plugin_data(events: EventAccumulator, tag: str) -> Any:
    """A record of the HParams tab."""
    return HParamsPluginData.FromString(events.PluginTagToContent("hparams")[tag])


def test_there_is_one_event_file_and_nothing_else(folder: Path, events: EventAccumulator) -> None:
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 1
    assert files[0].parent == Path("tensorboard")
    assert files[0].name.startswith("events.out.tfevents")


def test_the_session_starts_with_the_hyperparameters_in_their_types(events: EventAccumulator) -> None:
    start = plugin_data(events, metadata.SESSION_START_INFO_TAG).session_start_info
    told = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert told == HPARAMS
    kinds = {name: value.WhichOneof("kind") for name, value in start.hparams.items()}
    assert kinds == {
        "optimizer.lr": "number_value",
        "trainer.devices": "number_value",
        "compile": "bool_value",
        "optimizer": "string_value",
        "scheduler": "string_value",
    }


def test_the_session_ends_with_success(events: EventAccumulator) -> None:
    end = plugin_data(events, metadata.SESSION_END_INFO_TAG).session_end_info
    start = plugin_data(events, metadata.SESSION_START_INFO_TAG).session_start_info
    assert end.status == api_pb2.STATUS_SUCCESS
    assert end.end_time_secs >= start.start_time_secs > 0


def test_there_is_no_experiment_record_that_would_fix_the_columns(events: EventAccumulator) -> None:
    tags = set(events.PluginTagToContent("hparams"))
    assert tags == {metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG}


def test_the_scalars_are_those_that_were_logged_without_a_metric_of_lightnings(events: EventAccumulator) -> None:
    assert set(events.Tags()["scalars"]) == {"train/loss", "test/loss", "epoch"}
    assert [event.value for event in events.Scalars("test/loss")] == [0.25]


@pytest.mark.parametrize(("tag", "expected"), [("config", CONFIG), ("environment", {"host": "here"})])
def test_config_and_environment_are_shown_as_blocks_of_code(
    events: EventAccumulator, tag: str, expected: dict[str, Any]
) -> None:
    (event,) = events.Tensors(f"{tag}/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    lines = text.split("\n")
    assert all(line.startswith("    ") for line in lines)
    plain = "\n".join(line[4:] for line in lines)
    assert (yaml.safe_load if tag == "config" else json.loads)(plain) == expected


def test_a_failed_run_ends_its_session_as_failed_in_the_same_file(tmp_path: Path) -> None:
    events = run(tmp_path, fails=True)
    end = plugin_data(events, metadata.SESSION_END_INFO_TAG).session_end_info
    assert end.status == api_pb2.STATUS_FAILURE
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_values_of_a_step_are_one_record_and_what_is_no_number_is_told(tmp_path: Path) -> None:
    logger = RunLogger(str(tmp_path))
    logger.log_metrics({"a": torch.tensor(1.5), "b": 2}, step=3)
    with pytest.raises(ValueError, match="not supported"):
        logger.log_metrics({"a": 1.0, "b": "two"}, step=4)
    logger.experiment.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("b")] == [(3, 2.0)]
    at_step_3 = [event for event in events.Scalars("a") if event.step == 3]
    assert [event.value for event in at_step_3] == [1.5]
    assert at_step_3[0].wall_time == events.Scalars("b")[0].wall_time
