"""What is shown of a model before its training."""

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelSummary

from project.training.model_summary import Summary, summary_of
from small_classifier import Classifier, mlp


def test_parts_and_parameters_are_shown_and_nothing_that_was_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = Classifier(mlp())
    next(model.parameters()).requires_grad_(False)
    Summary().on_fit_start(L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), model)
    told = capsys.readouterr().out
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = next(model.parameters()).numel()
    assert f"{total:,} parameters, {total - frozen:,} trained" in told
    assert "net" in told
    assert "FLOPs" not in told


@pytest.mark.parametrize(
    ("config", "callbacks", "shown"),
    [
        ({"trainer": {}}, [], True),
        ({"trainer": {"enable_model_summary": False}}, [], False),
        ({"trainer": {}, "sweep": {"job": {"varied": []}}}, [], False),
        ({"trainer": {}, "sweep": {"direction": "max"}}, [], True),
        ({"trainer": {}}, [ModelSummary()], False),
    ],
    ids=["by_default", "turned_off", "job_of_a_sweep", "preset_of_sweeps", "another_one"],
)
def test_summary_is_shown_once_where_it_is_wanted(config: dict[str, Any], callbacks: list[Any], shown: bool) -> None:
    assert any(summary._max_depth for summary in summary_of(config, callbacks)) == shown  # type: ignore[attr-defined]


def test_jobs_of_a_sweep_keep_lightnings_own_out() -> None:
    config = {"trainer": {}, "sweep": {"job": {"varied": []}}}
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=summary_of(config, []))
    assert [type(c) for c in trainer.callbacks if isinstance(c, ModelSummary)] == [Summary]  # type: ignore[attr-defined]
