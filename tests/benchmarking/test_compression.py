"""What pruned and quantized models are compared by."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from project.benchmarking.compressed import sizes
from project.benchmarking.compression import Variant, compare_compression, record, shown_metric, tables
from project.benchmarking.measure import Contender, Measured, MeasurementError
from project.errors import UserError
from project.launch.run import Run


def report(accuracy: float, latency_ms: float, size: int) -> dict[str, Any]:
    return {
        "metrics": {"test/accuracy": accuracy, "test/loss": 0.0},
        "latency_ms": {"1": latency_ms},
        "bytes": size,
        "compressed_bytes": size // 2,
    }


def test_ratios_are_against_the_model_as_trained_in_the_same_turn() -> None:
    reference = Variant("as trained", "as trained", reports=[report(0.8, 2.0, 1000), report(0.8, 6.0, 1000)])
    smaller = Variant("half", "half", reports=[report(0.6, 1.0, 250), report(0.6, 2.0, 250)])
    row = record(smaller, reference, [1])
    assert row["metrics_ratio"] == {"test/accuracy": pytest.approx(0.75)}  # a loss of zero has no ratio
    assert (row["bytes_ratio"], row["compressed_bytes_ratio"]) == (0.25, 0.25)
    assert (row["times_as_fast_1"].low, row["times_as_fast_1"].high) == (2.0, 3.0)
    assert row["latency_ms_1"].median == 1.5
    failed = record(Variant("other", "other", error="no room"), reference, [1])
    assert failed == {"what": "other", "error": "no room"}
    assert shown_metric("val/accuracy", row) == shown_metric("val/f1", row) == "test/accuracy"
    quality, latency = tables([record(reference, reference, [1]), row, failed], "test/accuracy", [1])
    assert quality.row_count == latency.row_count == 3


def test_zeros_make_the_compressed_file_smaller_and_not_the_plain_one() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(100, 100)
    before = sizes(layer)
    with torch.no_grad():
        layer.weight[:80] = 0
    after = sizes(layer)
    assert after["bytes"] == before["bytes"] > 4 * 100 * 100
    assert after["compressed_bytes"] < 0.4 * before["compressed_bytes"]


@pytest.mark.parametrize(
    ("given", "overrides", "told"),
    [
        ({"amounts": [0.5, 1]}, [], "benchmark.amounts=[0.5, 1]: type a list of shares between 0 and 1"),
        ({"amounts": 0.5}, [], "benchmark.amounts=0.5: type a list of shares between 0 and 1, as [0.5,0.9], or []"),
        ({"amounts": ["half"]}, [], "benchmark.amounts=['half']: type a list of shares"),
        ({"quantize": "int8_dynamic"}, [], "benchmark.quantize=int8_dynamic: type a list of int8_dynamic,"),
        ({"quantize": ["int3"]}, [], "benchmark.quantize=['int3']: type a list of int8_dynamic, int8_weight_only"),
        ({}, ["callbacks=ema"], "callbacks=ema: this benchmark chooses the callbacks: leave it out"),
    ],
)
def test_what_can_not_be_compared_is_a_sentence(
    tmp_path: Path, given: dict[str, Any], overrides: list[str], told: str
) -> None:
    settings: dict[str, Any] = {
        "amounts": [], "quantize": [], "batch_sizes": [1], "calls": 1, "repeats": 1, "timeout_s": 60,
    } | given  # fmt: skip
    with pytest.raises(UserError) as error:
        compare_compression({}, Run(tmp_path, overrides, {}, 0.0), print, **settings)
    assert str(error.value).startswith(told)


@pytest.mark.slow
def test_models_are_compared_and_a_missing_package_is_a_row_with_its_sentence(
    run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_warm(contender: Contender, folder: Path, timeout_s: float) -> Measured:
        """As ``measure``, from an interpreter that has imported everything."""
        report = tmp_path / f"{folder.name}.json"
        _, module, *arguments = [text.format(report=report, folder=folder / "run") for text in contender.arguments]
        result = run_cli(module.removeprefix("project."), *arguments, timeout_s=timeout_s)
        if result.returncode:
            raise MeasurementError(result.stderr.splitlines()[-1])
        return Measured(0.0, 0.0, json.loads(report.read_text()) if report.exists() else {})

    monkeypatch.setattr("project.benchmarking.compression.measure", measure_warm)
    short = ["trainer.max_epochs=2", "trainer.accelerator=cpu"]
    results = compare_compression(
        {"monitor": "val/accuracy"}, Run(tmp_path / "benchmark", short, {}, 0.0), print, amounts=[0.5],
        quantize=["int8_weight_only"], batch_sizes=[1, 8], calls=3, repeats=1, timeout_s=60,
    )  # fmt: skip
    rows = {row["what"]: row for row in results.rows}
    assert list(rows) == ["as trained", "50% pruned", "int8_weight_only"]
    pruned, quantized = rows["50% pruned"], rows["int8_weight_only"]
    assert pruned["metrics"]["test/accuracy"] > 0.5
    assert pruned["bytes_ratio"] == pytest.approx(1, abs=0.01)
    assert pruned["compressed_bytes_ratio"] < 0.8
    assert pruned["times_as_fast_1"].median > 0
    assert pruned["latency_ms_8"].median > 0
    if importlib.util.find_spec("torchao") is None:
        assert 'type pip install "project[quantize]"' in quantized["error"]
        assert results.errors == [f"int8_weight_only: {quantized['error']}"]
    else:
        assert quantized["bytes_ratio"] < 0.4
        assert results.errors == []
