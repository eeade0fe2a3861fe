"""Notices are sentences, and other warnings are lines."""

import sysconfig
import warnings
from collections.abc import Callable

import pytest

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
