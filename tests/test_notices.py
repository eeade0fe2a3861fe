"""Notices are sentences, and other warnings are lines."""

import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from project.launch.quiet import quiet_libraries
from project.notices import Notice, notice, show_warnings_plainly

LIBRARY = f"{sysconfig.get_path('purelib')}/lightning/pytorch/trainer/connectors/logger_connector/result.py"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    show_warnings_plainly()
    once = warnings.formatwarning
    show_warnings_plainly()
    assert warnings.formatwarning is once
    return once


def test_a_notice_is_shown_as_it_stands(shown: Callable[..., str]) -> None:
    assert shown(Notice("No picture for val"), Notice, "here.py", 7) == "No picture for val\n"


def test_a_warning_is_a_line_with_the_place_of_ones_own_code_alone(shown: Callable[..., str]) -> None:
    told = UserWarning("another\n  line")
    assert shown(told, UserWarning, LIBRARY, 433, line="x = 1") == "warning: another line\n"
    assert shown(told, UserWarning, "here.py", 7, line="x = 1") == "warning: another line (here.py:7)\n"


def test_a_warning_is_whole_where_tracebacks_are_asked_for(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert shown(UserWarning("another"), UserWarning, "here.py", 7, line="x = 1").startswith("here.py:7: UserWarning")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "It is recommended to use `self.log('val/loss', ..., sync_dist=True)` when logging on epoch level in "
            "distributed setting to accumulate the metric across devices.",
            'pass sync_dist=True to self.log("val/loss", ...)',
        ),
        (
            "Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is 16. To avoid "
            "any miscalculations, use `self.log(..., batch_size=batch_size)`.",
            "self.log takes a batch for 16 samples",
        ),
        (
            "This DataLoader will create 4 worker processes in total. Our suggested max number of worker in current "
            "system is 2, which is smaller than what this DataLoader is going to create.",
            "type data.num_workers=2",
        ),
        (
            "Attribute 'net' is an instance of `nn.Module` and is already saved during checkpointing. It is "
            "recommended to ignore them using `self.save_hyperparameters(ignore=['net'])`.",
            'pass it ignore=["net"]',
        ),
    ],
)
def test_what_lightning_says_at_length_is_told_shortly(shown: Callable[..., str], theirs: str, ours: str) -> None:
    line = shown(UserWarning(theirs), UserWarning, LIBRARY, 433)
    assert ours in line
    assert "recommended" not in line
    assert line.endswith("\n")
    assert "miscalculations" not in line


def test_a_notice_can_be_caught_as_a_warning() -> None:
    with pytest.warns(Notice, match="told"):
        notice("told")


def test_ordinary_run_of_ones_own_classes_has_no_warning_of_libraries(tmp_path: Path) -> None:
    """A loader with pinned memory on the CPU and no logger: nothing follows from what they say of that."""
    data = DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=4, pin_memory=True)
    with warnings.catch_warnings(record=True) as told:
        quiet_libraries()
        L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(Plain(), data, data)  # fmt: skip
    assert [str(warning.message) for warning in told] == []


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss, logger=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
