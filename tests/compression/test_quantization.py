"""Models in eight bits."""

from typing import Any

import pytest
import torch
from torch import nn

from project.compression import KINDS
from project.compression.quantization import Quantization, quantization, quantize
from project.errors import UserError


def test_way_that_is_unknown_is_a_sentence() -> None:
    with pytest.raises(UserError, match="int3 is no way to quantize: type one of int8_dynamic, int8_weight_only"):
        quantization("int3")
    assert quantization(None) == []


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match='not installed: type pip install "project\\[quantize\\]"'):
        Quantization("int8_dynamic")


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers_compute_nearly_the_same(kind: str) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    x = torch.randn(32, 64)
    with torch.inference_mode():
        before = net(x)
        assert quantize(net, kind) == 2
        after = net(x)
    error = float((after - before).norm() / before.norm())
    assert 0 < error < 0.05
    with pytest.raises(UserError, match="Conv2d has no linear layers"):
        quantize(nn.Conv2d(1, 1, 3), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_trained_model_is_tested_and_evaluated_in_eight_bits_and_saved_in_full(run: Any, kind: str) -> None:
    pytest.importorskip("torchao")
    from project.config.from_checkpoint import compose_from_checkpoint

    quick = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
    folder, metrics = run(*quick, "callbacks=quantize", f"callbacks.quantize.kind={kind}")
    plain, own = run(*quick)
    assert metrics["test/loss"] != own["test/loss"]
    assert metrics["test/accuracy"] == pytest.approx(own["test/accuracy"], abs=0.02)
    saved, unquantized = (
        torch.load(path / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"] for path in (folder, plain)
    )
    assert all(torch.equal(saved[name], unquantized[name]) for name in unquantized)
    typed = [f"ckpt_path={plain}/checkpoints/best.ckpt", f"quantize={kind}"]
    config = compose_from_checkpoint("evaluate", ["evaluate", *typed])
    _, evaluated = run(*typed, command="evaluate", config=config)
    assert evaluated["test/loss"] == pytest.approx(metrics["test/loss"], abs=1e-4)
