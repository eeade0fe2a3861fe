"""Tables of texts and numbers, and how their columns become features."""

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

# What stands for a value that is not there, whatever the case.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})

DELIMITERS = ",;\t|"

Cells = NDArray[np.object_]  # (N,) texts; None where the value is missing
Numbers = NDArray[np.float64]  # (N,) with NaN where the value is missing
Table = dict[str, Cells | Numbers]


class Column(TypedDict, total=False):
    """How a column becomes features, as plain data that a config and a checkpoint can hold.

    Attributes:
        name: Of the column.
        values: Of a column of names: a feature for each, which is 1 where it is; "" stands for a missing value.
        mean: Of the training rows of a column of numbers; missing values become 0 after standardization.
        std: Likewise.
        missing: Whether another feature says where the value is missing.
    """

    name: str
    values: list[str]
    mean: float
    std: float
    missing: bool


def read_table(path: Path, delimiter: str = ",") -> Table:
    """The columns of a CSV file with a header, or of a Parquet file.

    Raises:
        ValueError: There is no such file, it is damaged or has no rows.
    """
    if not path.is_file():
        raise ValueError(f"data.path={path} is no file: type data.path= with a .csv or .parquet file")
    kind = path.suffix.lower()
    if kind not in (".csv", ".tsv", ".txt", ".parquet"):
        raise ValueError(f"data.path={path} must end in .csv, .tsv or .parquet: save the table as one of them")
    table = _read_parquet(path) if kind == ".parquet" else _read_csv(path, "\t" if kind == ".tsv" else delimiter)
    if not table or not len(next(iter(table.values()))):
        raise ValueError(f"data.path={path} has no rows: type another data.path=")
    return table


def _read_csv(path: Path, delimiter: str) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, delimiter=delimiter)
            header = [name.strip() for name in next(lines, [])]
            other = _other_delimiter(header, delimiter)
            if other:
                typed = r'"\t"' if other == "\t" else f'"{other}"'
                raise ValueError(
                    f"data.path={path} has one column, {header[0]!r}, between data.delimiter={delimiter!r}: type "
                    f"'data.delimiter={typed}'"
                )
            rows = []
            for row in lines:
                if len(row) != len(header) and row:
                    raise ValueError(
                        f"data.path={path}, line {lines.line_num}, has {len(row)} values under {len(header)} names: "
                        "mend it, or type another data.delimiter="
                    )
                if row:
                    rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"data.path={path} can't be read ({error}): save it as CSV in UTF-8") from error
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise ValueError(
            f"data.path={path} has two columns {twice[0] or 'without a name'}: give each a name of its own"
        )
    return {name: _typed(column) for name, column in zip(header, zip(*rows, strict=True), strict=False)}


def _other_delimiter(header: Sequence[str], delimiter: str) -> str | None:
    """What seems to stand between the names of a header that ``delimiter`` leaves in one piece."""
    if len(header) != 1:
        return None
    return max(
        (mark for mark in DELIMITERS if mark != delimiter and mark in header[0]), key=header[0].count, default=None
    )


def _typed(texts: Sequence[str]) -> Cells | Numbers:
    """Numbers where all values are some, texts otherwise."""
    cells = np.array([None if text.strip().lower() in MISSING else text.strip() for text in texts], dtype=object)
    try:
        return np.array([math.nan if cell is None else float(cell) for cell in cells])
    except ValueError:
        return cells


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f'data.path={path} needs the package pyarrow: type pip install "project[parquet]", or save it as CSV'
        ) from error
    try:
        columns = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"data.path={path} is no Parquet file ({error}): type another data.path=") from error
    return {name: _from_arrow(columns[name].to_pylist()) for name in columns.column_names}


def _from_arrow(values: Sequence[Any]) -> Cells | Numbers:
    if all(value is None or type(value) in (int, float) for value in values):
        return np.array([math.nan if value is None else float(value) for value in values])
    return _typed(["" if value is None else str(value) for value in values])


def is_missing(column: Cells | Numbers) -> NDArray[np.bool_]:
    """Where a column has no value, (N,)."""
    if column.dtype == np.float64:
        return np.isnan(column)
    return np.array([cell is None for cell in column], dtype=np.bool_)


def texts_of(column: Cells | Numbers) -> Cells:
    """A column's values as texts; whole numbers without a point."""
    if column.dtype != np.float64:
        return cast("Cells", column)
    texts = [None if math.isnan(x) else str(int(x)) if x.is_integer() else str(x) for x in column.tolist()]
    return np.array(texts, dtype=object)


def numbers_of(column: Cells | Numbers, name: str, or_else: str) -> Numbers:
    """A column that must be numbers.

    Args:
        column: (N,).
        name: To be told; so is the row, the first below the header being 1.
        or_else: What to do if it is not to be one of numbers.

    Raises:
        ValueError: A value is none, or has no end.
    """
    if column.dtype == np.float64:
        wrong = np.isinf(column)
    else:
        wrong = np.array([not (cell is None or _is_number(cell)) for cell in column])
    for row in np.flatnonzero(wrong).tolist():
        raise ValueError(f"column {name}, row {row + 1}: {column[row]} is no finite number: mend it, or {or_else}")
    return column.astype(np.float64)  # a None becomes NaN


def check_numbers(table: Mapping[str, Cells | Numbers], categorical: Sequence[str]) -> None:
    """Check that a column which is not `categorical` holds numbers alone, or none at all.

    Raises:
        ValueError: One holds both.
    """
    for name, column in table.items():
        if name not in categorical and not _has_no_number(column):
            numbers_of(column, name, _or_names(name))


def describe(table: Mapping[str, Cells | Numbers], categorical: Sequence[str], max_categories: int) -> list[Column]:
    """How each column of these rows, those that are trained on, becomes features.

    A column is one of names if it is among `categorical`, or no value in it is a number. Of its values the
    `max_categories` most frequent get a feature; a row with another has 0 in all of them. A column that is the same in
    all rows is left out: nothing can be learned from it, and there is no scale for another value that comes later.

    Raises:
        ValueError: A column has numbers and other values, or so many values that each row has its own.
    """
    return [
        _names(name, texts_of(column), max_categories)
        if name in categorical or _has_no_number(column)
        else _numbers(name, numbers_of(column, name, _or_names(name)))
        for name, column in table.items()
        if not is_constant(column)
    ]


def is_constant(column: Cells | Numbers) -> bool:
    """Whether a column has one value in all rows, or none in any."""
    missing = is_missing(column)
    return bool(missing.all()) or (not missing.any() and bool((column == column[0]).all()))


def unseen(table: Mapping[str, Cells | Numbers], columns: Sequence[Column]) -> dict[str, Cells]:
    """Of each column of names, the values in these rows that have no feature, if there are any."""
    found = {}
    for column in columns:
        if "values" in column:
            cells = texts_of(table[column["name"]])
            without = np.array([(cell or "") not in column["values"] for cell in cells], dtype=np.bool_)
            if without.any():
                found[column["name"]] = cells[without]
    return found


def _or_names(name: str) -> str:
    return f"type data.categorical=[{name}] if the column holds names, data.drop=[{name}] to leave it out"


def _has_no_number(column: Cells | Numbers) -> bool:
    if column.dtype == np.float64:
        return False
    return not any(_is_number(cell) for cell in column if cell is not None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names(name: str, column: Cells, max_categories: int) -> Column:
    counts = Counter("" if cell is None else cell for cell in column)
    if len(counts) == len(column) > max_categories:
        raise ValueError(
            f"column {name} has another text in each of {len(column)} rows, from which nothing can be learned: "
            f"type data.drop=[{name}]"
        )
    # The most frequent, of equally frequent ones the first by name; then by name.
    kept = sorted(sorted(counts, key=lambda value: (-counts[value], value))[:max_categories])
    return Column(name=name, values=kept)


def _numbers(name: str, column: Numbers) -> Column:
    there = column[~np.isnan(column)]
    # The deviation of equal numbers is not always 0: their mean is rounded.
    std = float(there.std()) if there.min() < there.max() else 1.0
    return Column(name=name, mean=float(there.mean()), std=std or 1.0, missing=len(there) < len(column))


def encode(table: Mapping[str, Cells | Numbers], columns: Sequence[Column]) -> NDArray[np.float32]:
    """Features (N, F) of a table's rows.

    Raises:
        ValueError: The table lacks a column, or a value is no number where there should be one.
    """
    lacking = [column["name"] for column in columns if column["name"] not in table]
    if lacking:
        raise ValueError(
            f"the table has no column {lacking[0]}, which features are made of; there are {', '.join(table)}: add it"
        )
    features: list[NDArray[Any]] = []
    for column in columns:
        cells = table[column["name"]]
        if "values" in column:
            texts = np.where(is_missing(cells), "", texts_of(cells))
            features += [texts == value for value in column["values"]]
            continue
        numbers = numbers_of(cells, column["name"], "take the row out")
        features.append(np.nan_to_num((numbers - column["mean"]) / column["std"]))
        if column["missing"]:
            features.append(np.isnan(numbers))
    return np.stack(features, axis=1).astype(np.float32)
