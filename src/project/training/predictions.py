"""Predictions of all ranks in one file: one row per sample, in the order of the data."""

from __future__ import annotations

import csv
import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from project.config.preflight import extra_of
from project.data import EvaluationBatches
from project.errors import UserError
from project.files import beside
from project.launch.heartbeat import BEAT

Row = dict[str, Any]


class PredictionWriter(BasePredictionWriter):
    """Each rank writes its rows as they come; at the end rank 0 merges the parts by the samples' index.

    ``predict_step`` returns a tensor (B,) or (B, C), or a dict of such and of lists of batch length; (B, C) becomes a
    column for each of C. The file appears whole, under its name, when all rows are in it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.num_rows = 0
        self._part: TextIO | None = None
        self._rows: csv.DictWriter[str] | None = None
        self._next_index = 0
        self._writes = True
        self._types: dict[str, type] = {}
        if path.suffix == ".parquet":
            _import_pyarrow()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Ranks that split one model predict the same samples; one of them writes.
        self._writes = getattr(trainer.strategy, "is_first_with_its_data", True)
        self._part = self._part_path(trainer.global_rank).open("w", newline="")

    def on_predict_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        BEAT(batch_idx, "predicts")

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if not self._writes:
            return
        columns = _columns(prediction, type(pl_module).__name__)
        length = len(next(iter(columns.values())))
        sampler = getattr(trainer.predict_dataloaders, "sampler", None)
        if isinstance(sampler, EvaluationBatches):
            indices = sampler.share(batch_idx).tolist()
            columns = _of_samples(trainer, indices) | columns
        else:  # a loader that only one rank reads, in the order of its data
            indices = list(range(self._next_index, self._next_index + length))
            self._next_index += length
        columns |= _class_names(trainer, columns)
        if self._rows is None:
            assert self._part is not None
            self._rows = csv.DictWriter(self._part, ["index", *columns])
            self._types = {"index": int} | {name: type(column[0]) for name, column in columns.items()}
            self._rows.writeheader()
        columns = {"index": indices, **columns}
        self._rows.writerows(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._part is not None
        self._part.close()
        trainer.strategy.barrier("predictions written")
        BEAT.rest()
        if trainer.is_global_zero:
            parts = [self._part_path(rank) for rank in range(trainer.world_size)]
            with beside(self.path) as written:
                if self.path.suffix == ".parquet":
                    self.num_rows = _write_parquet(parts, written, self._types)
                else:
                    self.num_rows = _write_csv(parts, written)
            for part in parts:
                part.unlink()

    def _part_path(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.rank_{rank}")


def _of_samples(trainer: L.Trainer, indices: list[int]) -> dict[str, list[Any]]:
    """What the data module says of these samples by its method ``sample_columns``, such as their files."""
    describe = getattr(getattr(trainer, "datamodule", None), "sample_columns", None)
    return describe(indices) if describe is not None else {}


def _class_names(trainer: L.Trainer, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A column ``class`` where predictions are labels of the data module's ``classes``."""
    classes = getattr(getattr(trainer, "datamodule", None), "classes", None)
    labels = columns.get("prediction", [])
    if not classes or "class" in columns or not all(type(x) is int and 0 <= x < len(classes) for x in labels):
        return {}
    return {"class": [classes[label] for label in labels]} if labels else {}


def _columns(prediction: Any, model: str) -> dict[str, list[Any]]:
    """The columns of one batch, as lists of equal length."""
    if isinstance(prediction, Tensor) and prediction.ndim in (1, 2):
        prediction = {"prediction": prediction}
    if not isinstance(prediction, dict) or not prediction:
        raise UserError(
            f"{model}.predict_step returns {type(prediction).__name__}: return a tensor (B,) or (B, C), or a dict of "
            "such"
        )
    prediction = {name: column for key, values in prediction.items() for name, column in _split(key, values)}
    for name, values in prediction.items():
        if not (isinstance(values, list | tuple) or (isinstance(values, Tensor) and values.ndim == 1)):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"{model}.predict_step returns {name} as {shape}: return one value per sample, (B,), or (B, C)"
            )
    columns = {name: v.tolist() if isinstance(v, Tensor) else list(v) for name, v in prediction.items()}
    if len({len(column) for column in columns.values()}) != 1:
        raise UserError(f"{model}.predict_step returns columns of different lengths: return one value per sample")
    return columns


def _split(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """A column for each number of a sample: ``name_0``, ``name_1``; ``name`` where it is one."""
    if not isinstance(values, Tensor) or values.ndim != 2:
        yield name, values
        return
    for number, column in enumerate(values.unbind(dim=1)):
        yield name if values.shape[1] == 1 else f"{name}_{number}", column


def _merged(parts: list[TextIO]) -> Iterator[Row]:
    """All rows by index; each part is in order already, so memory holds one row a part.

    Raises:
        UserError: an index comes twice or out of order.
    """
    last = -1
    for row in heapq.merge(*(csv.DictReader(part) for part in parts), key=lambda row: int(row["index"])):
        if int(row["index"]) <= last:
            raise UserError(
                f"sample {row['index']} is predicted twice or out of order: let predict_dataloader neither shuffle "
                "nor repeat"
            )
        last = int(row["index"])
        yield row


def _write_csv(parts: list[Path], path: Path) -> int:
    count = 0
    with ExitStack() as files, path.open("w", newline="") as file:
        rows: csv.DictWriter[str] | None = None
        for row in _merged([files.enter_context(part.open(newline="")) for part in parts]):
            if rows is None:
                rows = csv.DictWriter(file, list(row))
                rows.writeheader()
            rows.writerow(row)
            count += 1
    return count


def _write_parquet(parts: list[Path], path: Path, types: dict[str, type]) -> int:
    """Through the merged CSV; the types are told, for a text of digits or a late decimal point would mislead."""
    _import_pyarrow()
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    of_python = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    told = {name: of_python[kind] for name, kind in types.items() if kind in of_python}
    convert = pyarrow.csv.ConvertOptions(column_types=told)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    text = path.with_suffix(".csv")
    try:
        count = _write_csv(parts, text)
        with (
            pyarrow.csv.open_csv(text, parse_options=parse, convert_options=convert) as reader,
            pyarrow.parquet.ParquetWriter(path, reader.schema) as writer,
        ):
            for batch in reader:
                writer.write_batch(batch)
    finally:
        text.unlink(missing_ok=True)
    return count


def _import_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        extra = extra_of("pyarrow")
        raise UserError(
            f'format=parquet needs the package pyarrow: type pip install "project[{extra}]", or format=csv'
        ) from error
