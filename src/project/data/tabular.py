"""Rows of a table, to predict one column from the others."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from project.data.datamodule import SPLITS, DataModule, TensorDataset
from project.data.tables import (
    Cells,
    Column,
    Numbers,
    Table,
    check_numbers,
    describe,
    encode,
    is_constant,
    is_missing,
    numbers_of,
    read_table,
    texts_of,
    unseen,
)
from project.notices import notice

TASKS = ("classification", "regression")


class TabularDataModule(DataModule):
    """A CSV or Parquet file, whose rows are split by `seed`.

    Batch: `{"features": (B, F) float32}` with `{"label": (B,) int64}` in classification and `{"target": (B,) float32}`,
    in the column's own unit, in regression.

    Numbers are standardized by the training rows. Missing ones become 0 after that, the mean, and another feature says
    where they are, if there are any in the training rows. Columns of names become a feature for each name (missing
    being one, if it occurs); names that the training rows don't have, or that are not among the `max_categories` most
    frequent, become 0 in all of them. Rows without a target are left out, but for predictions.

    Configs find `columns` and the facts below them before the run, and a checkpoint keeps them: rows that come later
    are turned into features in the same way. As None they are found in the rows at hand.

    Args:
        path: The file; None takes scikit-learn's table of breast cancer diagnoses.
        target: The column to predict.
        task: classification or regression.
        drop: Columns to leave out.
        categorical: Columns of names that look like numbers, such as codes.
        max_categories: Features at most for a column of names.
        delimiter: Between the values of a CSV file.
        val_fraction: Share of the rows that is kept for validation.
        test_fraction: Share that is kept for the test.
        columns: How each column becomes features; see `tables.Column`.
        classes: The target's values, label 0 first.
        num_features: F.
        num_outputs: Of the net: the number of classes, or 1.
        target_scale: Mean and standard deviation of the training rows' target, in regression.
        loading: Arguments of `DataModule`.

    Raises:
        ValueError: A number is out of range, the file has not what it should, or a fact is not that of the file.
    """

    def __init__(
        self,
        path: str | None = None,
        target: str = "diagnosis",
        task: str = "classification",
        drop: Sequence[str] = (),
        categorical: Sequence[str] = (),
        max_categories: int = 64,
        delimiter: str = ",",
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        columns: Sequence[Column] | None = None,
        classes: Sequence[str] | None = None,
        num_features: int | None = None,
        num_outputs: int | None = None,
        target_scale: Sequence[float] | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if task not in TASKS:
            raise ValueError(f"data.task={task} is unknown: type data.task={' or data.task='.join(TASKS)}")
        if max_categories < 1:
            raise ValueError(f"data.max_categories={max_categories} must be at least 1: type data.max_categories=64")
        if len(delimiter) != 1:
            raise ValueError(f'data.delimiter={delimiter} must be one character: type data.delimiter=";"')
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ValueError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} must be above 0 "
                "and leave training samples: type data.val_fraction=0.15 data.test_fraction=0.15"
            )
        self.path = None if path is None else Path(path).expanduser()
        self.target = target
        self.task = task
        self.drop = list(drop)
        self.categorical = list(categorical)
        self.max_categories = max_categories
        self.delimiter = delimiter
        self.fractions = {"val": val_fraction, "test": test_fraction}
        self._rows: dict[str, NDArray[np.int64]] = {}  # of each split, the rows of the file, from 1
        self.known: dict[str, Any] = {
            "columns": None if columns is None else list(columns),
            "classes": None if classes is None else list(classes),
            "num_features": num_features,
            "num_outputs": num_outputs,
            "target_scale": None if target_scale is None else list(target_scale),
        }

    def facts(self) -> dict[str, Any]:
        """What the net and later rows must know of the training rows: the arguments from `columns` on."""
        table, target, _ = self._read()
        return self._facts(table, target)

    @property
    def classes(self) -> list[str] | None:
        """The target's values, label 0 first; None in regression, and while they are not known."""
        classes: list[str] | None = self.known["classes"]
        return classes

    def sample_columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """What tells the predicted samples apart: their rows in the file, the first below the header being 1."""
        return {"row": self._rows[self.predict_split][list(indices)].tolist()}

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        table, target, rows_of_file = self._read(target_needed=stage != "predict")
        found = self.known if self.known["columns"] is not None else self._facts(table, target)
        features = torch.from_numpy(encode(table, found["columns"]))
        if target is None:
            self.train_set = self.val_set = self.test_set = TensorDataset({"features": features})
            self._rows = dict.fromkeys(SPLITS, rows_of_file)
            self._tell_unseen(table, found["columns"])
            return
        if self.task == "regression":
            tensors = {"features": features, "target": torch.from_numpy(target.astype(np.float32))}
        else:
            tensors = {
                "features": features,
                "label": torch.from_numpy(self._labels(texts_of(target), found["classes"])),
            }
        splits = self._splits(len(features))
        self._tell(table, target, found, splits)
        for split, rows in splits.items():
            self._rows[split] = rows_of_file[rows.numpy()]
            setattr(self, f"{split}_set", TensorDataset({name: tensor[rows] for name, tensor in tensors.items()}))

    def _read(self, target_needed: bool = True) -> tuple[Table, Cells | Numbers | None, NDArray[np.int64]]:
        """The columns that features are made of, the target's, None where it is not there and need not be, and rows."""
        table = _breast_cancer() if self.path is None else read_table(self.path, self.delimiter)
        for key, names in {"target": [self.target], "drop": self.drop, "categorical": self.categorical}.items():
            lacking = [name for name in names if name not in table]
            # What was left out in training need not be there later.
            if lacking and (key == "categorical" or target_needed):
                raise ValueError(
                    f"data.{key}={lacking[0]} is no column of {self.path or 'the table'}, whose columns are "
                    f"{', '.join(table)}: type data.{key}= with one of them"
                )
        target = table.pop(self.target, None)
        table = {name: column for name, column in table.items() if name not in self.drop}
        if not table:
            raise ValueError(f"{self.path} has no column besides the target: give it one to predict from")
        if self.known["columns"] is None:
            check_numbers(table, self.categorical)  # in all rows, so that a wrong value is told with its row
        if target is None or (not target_needed and bool(is_missing(target).any())):
            return table, None, np.arange(1, len(next(iter(table.values()))) + 1)
        there = ~is_missing(target)
        if not there.all() and self.known["columns"] is not None:
            notice(f"Left out: {(~there).sum()} of {len(there)} rows, which have no {self.target}")
        if not there.any():
            raise ValueError(f"column {self.target} has no value in any row: type another data.target=")
        if self.task == "regression":
            target = numbers_of(target, self.target, "type experiment=tabular_mlp if the column holds classes")
        else:
            target = texts_of(target)
        return {name: column[there] for name, column in table.items()}, target[there], np.flatnonzero(there) + 1

    def _facts(self, table: Table, target: Cells | Numbers | None) -> dict[str, Any]:
        assert target is not None
        train = self._splits(len(target))["train"].numpy()
        columns = describe(
            {name: column[train] for name, column in table.items()}, self.categorical, self.max_categories
        )
        if not columns:
            raise ValueError("each column is the same in all training rows: give the table one to predict from")
        num_features = sum(len(column["values"]) if "values" in column else 1 + column["missing"] for column in columns)
        facts = {"columns": [dict(column) for column in columns], "num_features": num_features}
        if self.task == "regression":
            if is_constant(target):
                raise ValueError(f"column {self.target} is {target[0]} in all rows: there is nothing to predict")
            scale = [float(target[train].mean()), float(target[train].std()) or 1.0]
            return facts | {"classes": None, "num_outputs": 1, "target_scale": scale}
        classes = self._classes(texts_of(target))
        return facts | {"classes": classes, "num_outputs": len(classes), "target_scale": None}

    def _tell(
        self, table: Table, target: Cells | Numbers, found: dict[str, Any], splits: dict[str, torch.Tensor]
    ) -> None:
        """Say what is left out, and what the training rows lack."""
        train = splits["train"].numpy()
        features = {column["name"] for column in found["columns"]}
        if idle := [name for name in table if name not in features]:
            notice(f"Left out, because they are the same in all training rows: {', '.join(idle)}")
        if self.task == "classification":
            trained = set(texts_of(target)[train].tolist())
            if lacking := [name for name in found["classes"] if name not in trained]:
                notice(f"Classes without a training row, which can't be learned: {', '.join(lacking)}")
        others = np.setdiff1d(np.arange(len(target)), train)
        self._tell_unseen({name: column[others] for name, column in table.items()}, found["columns"])

    def _tell_unseen(self, table: Table, columns: Sequence[Column]) -> None:
        for name, values in unseen(table, columns).items():
            what = f"{values[0]}" if values[0] is not None else "no value"
            notice(
                f"Column {name}: {len(values)} rows outside of training hold names that have no feature, as {what}, "
                "and get 0 in all of that column"
            )

    def _classes(self, target: Cells) -> list[str]:
        classes = sorted(set(target.tolist()), key=_numbers_by_value)
        if len(classes) < 2:
            raise ValueError(f"column {self.target} is {classes[0]} in all rows: there is nothing to predict")
        if len(classes) > len(target) / 2:
            raise ValueError(
                f"column {self.target} has {len(classes)} different values in {len(target)} rows, too many for "
                "classes: type experiment=tabular_regression, or another data.target="
            )
        return classes

    def _labels(self, target: Cells, classes: Sequence[str]) -> NDArray[np.int64]:
        labels = {name: label for label, name in enumerate(classes)}
        unknown = sorted(set(target.tolist()) - set(labels))
        if unknown:
            raise ValueError(
                f"column {self.target} holds {unknown[0]}, which is none of the classes {', '.join(classes)}: "
                "take those rows out, or train with them"
            )
        return np.array([labels[name] for name in target], dtype=np.int64)

    def _splits(self, num_rows: int) -> dict[str, torch.Tensor]:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(self.seed))
        num_val, num_test = (round(fraction * num_rows) for fraction in self.fractions.values())
        if not min(num_val, num_test) or num_val + num_test >= num_rows:
            raise ValueError(
                f"{num_rows} rows are too few for data.val_fraction={self.fractions['val']} and "
                f"data.test_fraction={self.fractions['test']}: give it more rows"
            )
        val, test, train = order.tensor_split([num_val, num_val + num_test])
        return {"train": train, "val": val, "test": test}


def _numbers_by_value(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _breast_cancer() -> Table:
    """569 rows of 30 measurements, benign or malignant, of Wolberg, Street and Mangasarian; ships with scikit-learn."""
    from sklearn.datasets import load_breast_cancer  # here, because the import takes more than a second

    data = load_breast_cancer()
    table: Table = {str(name): column for name, column in zip(data.feature_names, data.data.T, strict=True)}
    table["diagnosis"] = np.array([str(name) for name in data.target_names[data.target]], dtype=object)
    return table
