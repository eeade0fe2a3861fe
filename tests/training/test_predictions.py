"""Predictions of all ranks in one file, one row per sample, in the order of the data."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from project.data.loaders import evaluation_loader
from project.errors import UserError
from project.launch.heartbeat import Beat
from project.training import predictions
from project.training.predictions import PredictionWriter

Predict = Callable[[Tensor], Any]


class Model(L.LightningModule):
    def __init__(self, function: Predict) -> None:
        super().__init__()
        self.function = function

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.function(batch)


def predict(function: Predict, path: Path, length: int = 7, shared: bool = True) -> PredictionWriter:
    """Predictions for the samples 0.0, 1.0, ... in batches of 3."""
    writer = PredictionWriter(path)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[writer]
    )
    data: Any = torch.arange(float(length))
    loader: Any = evaluation_loader(data, default_collate, 3, None) if shared else DataLoader(data, batch_size=3)
    trainer.predict(Model(function), loader, return_predictions=False)
    return writer


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_rank_that_predicts_is_watched_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = Beat()
    beat.start_alone()
    monkeypatch.setattr(predictions, "BEAT", beat)
    seen: list[str] = []

    def noting(x: Tensor) -> Tensor:
        seen.extend(f"{sign.phase} {sign.step}" for sign in beat.signs())
        return x

    predict(noting, tmp_path / "predictions.csv")
    assert seen == ["predicts 0", "predicts 1", "predicts 2"]
    assert beat.signs() == []


@pytest.mark.parametrize("shared", [True, False], ids=["our_loader", "plain_loader"])
def test_there_is_one_row_per_sample_in_the_order_of_the_data(tmp_path: Path, shared: bool) -> None:
    writer = predict(lambda x: x * 2, tmp_path / "predictions.csv", shared=shared)
    assert rows(writer.path) == [{"index": str(i), "prediction": str(2.0 * i)} for i in range(7)]
    assert writer.num_rows == 7
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.long(), {"prediction": "1"}),
        (lambda x: x > 0, {"prediction": "True"}),
        (
            lambda x: torch.stack([x, -x, x * 0.5], dim=1),
            {f"prediction_{i}": v for i, v in enumerate(["1.0", "-1.0", "0.5"])},
        ),
        (lambda x: x[:, None], {"prediction": "1.0"}),
        (lambda x: {"a": x.long(), "b": x / 4}, {"a": "1", "b": "0.25"}),
        (lambda x: {"a": x[:, None], "b": torch.stack([x, -x], dim=1)}, {"a": "1.0", "b_0": "1.0", "b_1": "-1.0"}),
        (
            lambda x: {"label": x.long(), "name": [f'of "{v:.0f}", ü' for v in x.tolist()]},
            {"label": "1", "name": 'of "1", ü'},
        ),
        (lambda x: {"text": [f"two\nlines {v}" for v in x.tolist()]}, {"text": "two\nlines 1.0"}),
    ],
    ids=["whole", "truth", "two_dimensions", "one_column", "dict", "dict_of_two_dimensions", "strings", "lines"],
)
def test_columns_are_those_of_what_the_model_returns(
    tmp_path: Path, function: Predict, expected: dict[str, str]
) -> None:
    writer = predict(function, tmp_path / "predictions.csv")
    assert rows(writer.path)[1] == {"index": "1", **expected}
    assert len(rows(writer.path)) == 7


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x.tolist(), "Model.predict_step returns list: return a tensor"),
        (lambda x: {}, "Model.predict_step returns dict: return a tensor"),
        (lambda x: {"a": x, "b": x[:1]}, "Model.predict_step returns columns of different lengths"),
        (lambda x: x.mean(), "Model.predict_step returns"),
        (lambda x: {"mean": x.mean()}, "Model.predict_step returns"),
        (lambda x: x[:, None, None], "Model.predict_step returns"),
    ],
    ids=["list", "empty", "lengths", "scalar", "scalar_in_dict", "three_dimensions"],
)
def test_what_is_no_column_is_refused(tmp_path: Path, function: Predict, text: str) -> None:
    with pytest.raises(UserError) as info:
        predict(function, tmp_path / "predictions.csv")
    assert str(info.value).startswith(text)
    assert not (tmp_path / "predictions.csv").exists()


def test_a_run_that_fails_half_way_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    def fail(x: Tensor) -> Tensor:
        if x[0] > 0:
            raise RuntimeError("boom")
        return x

    with pytest.raises(RuntimeError, match="boom"):
        predict(fail, tmp_path / "predictions.csv")
    assert not (tmp_path / "predictions.csv").exists()


def merge(path: Path, *parts: str) -> PredictionWriter:
    """What rank 0 does when all ranks have written their parts."""
    writer = PredictionWriter(path)
    for rank, part in enumerate(parts):
        writer._part_path(rank).write_text(part)
    writer._part = writer._part_path(0).open("a")
    strategy = SimpleNamespace(barrier=lambda name: None)
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=True, world_size=len(parts))
    writer.on_predict_end(trainer, L.LightningModule())  # type: ignore[arg-type]
    return writer


@pytest.mark.parametrize(
    "parts",
    [
        ["index,p\n0,a\n1,b\n", "index,p\n2,c\n3,d\n"],
        ["index,p\n0,a\n2,c\n", "index,p\n1,b\n3,d\n"],
        ["index,p\n0,a\n1,b\n2,c\n3,d\n", ""],
        ["index,p\n3,d\n", "index,p\n0,a\n1,b\n", "index,p\n2,c\n"],
    ],
    ids=["blocks", "alternating", "one_rank_idle", "three_ranks"],
)
def test_rows_of_all_ranks_are_merged_by_their_index(tmp_path: Path, parts: list[str]) -> None:
    writer = merge(tmp_path / "predictions.csv", *parts)
    assert [tuple(row.values()) for row in rows(writer.path)] == [("0", "a"), ("1", "b"), ("2", "c"), ("3", "d")]
    assert writer.num_rows == 4
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]


@pytest.mark.parametrize(
    ("parts", "index"),
    [(["index,p\n0,a\n1,b\n", "index,p\n1,b\n2,c\n"], 1), (["index,p\n0,a\n2,c\n1,b\n"], 1)],
    ids=["twice", "out_of_order"],
)
def test_a_sample_that_comes_twice_or_out_of_order_is_refused(tmp_path: Path, parts: list[str], index: int) -> None:
    with pytest.raises(UserError, match=f"sample {index} is predicted twice or out of order: let predict_dataloader"):
        merge(tmp_path / "predictions.csv", *parts)
    assert not (tmp_path / "predictions.csv").exists()


def test_parquet_holds_what_csv_holds_with_its_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    def function(x: Tensor) -> Any:
        values = x.tolist()
        return {
            "whole": x.long(),
            "real": x / 3,
            "name": [f"sample, {v}" for v in values],
            "code": [f"{int(v):03d}" for v in values],  # a text of digits stays a text
            "lines": [f"two\nlines {v}" for v in values],
            "late": ["1" if v < 6 else "x" for v in values],
        }

    predict(function, tmp_path / "predictions.csv")
    predict(function, tmp_path / "predictions.parquet")
    table = parquet.read_table(tmp_path / "predictions.parquet")
    types = dict.fromkeys(["index", "whole"], "int64") | {"real": "double"}
    types |= dict.fromkeys(["name", "code", "lines", "late"], "string")
    assert {field.name: str(field.type) for field in table.schema} == types
    as_text = [{name: str(value) for name, value in row.items()} for row in table.to_pylist()]
    assert as_text == rows(tmp_path / "predictions.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.csv", "predictions.parquet"]


def test_parquet_without_its_package_is_refused_before_any_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'type pip install "project\[parquet\]", or format=csv'):
        PredictionWriter(tmp_path / "predictions.parquet")


def test_labels_get_the_names_of_the_data_modules_classes(tmp_path: Path) -> None:
    class Data(L.LightningDataModule):
        classes = ("low", "high")

        def sample_columns(self, indices: list[int]) -> dict[str, list[str]]:
            return {"file": [f"{index}.png" for index in indices]}

        def predict_dataloader(self) -> Any:
            data: Any = torch.arange(7.0)
            return evaluation_loader(data, default_collate, 3, None)

    writer = PredictionWriter(tmp_path / "predictions.csv")
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[writer]
    )
    trainer.predict(Model(lambda x: (x > 3).long()), datamodule=Data(), return_predictions=False)
    expected = [(str(i), f"{i}.png", str(int(i > 3)), "high" if i > 3 else "low") for i in range(7)]
    assert [tuple(row.values()) for row in rows(writer.path)] == expected
