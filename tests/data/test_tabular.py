"""Tables: their columns as features, their splits, and what is told of junk in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from project.data import TabularDataModule, tabular
from project.data.tables import read_table

CITIES = ["Oslo", "Lima", "Pune"]


def write_csv(path: Path, header: list[str], rows: list[list[Any]], delimiter: str = ",") -> Path:
    lines = [header, *rows]
    path.write_text("".join(delimiter.join(map(str, line)) + "\n" for line in lines))
    return path


def people(folder: Path, count: int = 40) -> Path:
    """The age of every tenth and the city of every eighth is not known."""
    rows = []
    for number in range(count):
        age = "NA" if number % 10 == 5 else number
        city = "" if number % 8 == 3 else CITIES[number % 3]
        rows.append([age, city, f"0{number % 2}", 2.5 * number, ["no", "yes"][number % 2]])
    return write_csv(folder / "people.csv", ["age", "city", "code", "income", "buys"], rows)


def module(path: Path | None, **arguments: Any) -> TabularDataModule:
    defaults: dict[str, Any] = {"path": path and str(path), "target": "buys", "batch_size": 4}
    return TabularDataModule(**defaults | arguments)


def loaded(path: Path | None, stage: str | None = None, **arguments: Any) -> TabularDataModule:
    datamodule = module(path, **arguments)
    datamodule.setup(stage)
    return datamodule


def tensors(datamodule: TabularDataModule, split: str = "train") -> dict[str, Tensor]:
    found: dict[str, Tensor] = getattr(datamodule, f"{split}_set").tensors
    return found


def test_numbers_are_standardized_and_what_is_missing_is_the_mean_with_a_mark(tmp_path: Path) -> None:
    datamodule = loaded(people(tmp_path), drop=["city", "code"])
    features = tensors(datamodule)["features"]
    assert features.shape == (28, 3)  # age, its absence, income
    assert features.dtype == torch.float32
    unknown = features[:, 1] == 1
    assert 0 < unknown.sum() < 28
    assert (features[unknown, 0] == 0).all()
    for column in (features[~unknown, 0], features[:, 2]):
        assert column.mean().abs() < 1e-6
        assert column.std(correction=0) == pytest.approx(1)
    test = tensors(datamodule, "test")["features"]
    assert test[:, 2].mean().abs() > 1e-3  # by the statistics of others


def test_names_become_a_feature_each_and_a_missing_one_is_a_name(tmp_path: Path) -> None:
    datamodule = loaded(people(tmp_path), drop=["age", "income", "code"])
    (column,) = datamodule.facts()["columns"]
    assert column == {"name": "city", "values": ["", "Lima", "Oslo", "Pune"]}
    features = torch.cat([tensors(datamodule, split)["features"] for split in ("train", "val", "test")])
    assert features.sum(1).eq(1).all()
    assert features.sum(0).tolist() == [5, 12, 12, 11]


def test_codes_are_names_when_told_and_rare_names_have_no_feature(tmp_path: Path) -> None:
    path = people(tmp_path)
    as_numbers = module(path).facts()["columns"]
    assert {column["name"]: "values" in column for column in as_numbers} == {
        "age": False, "city": True, "code": False, "income": False,
    }  # fmt: skip
    told = module(path, categorical=["code"], max_categories=2).facts()["columns"]
    assert [column.get("values") for column in told if column["name"] == "code"] == [["0", "1"]]
    assert [len(column["values"]) for column in told if column["name"] == "city"] == [2]
    assert tensors(loaded(path, max_categories=2))["features"].shape[1] == 2 + 2 + 1 + 1


def test_every_row_with_a_target_is_in_one_split(tmp_path: Path) -> None:
    path = people(tmp_path)
    path.write_text(path.read_text().replace("97.5,yes", "97.5,"))
    datamodule = loaded(path, target="age", task="regression")
    splits = [tensors(datamodule, split)["target"] for split in ("train", "val", "test")]
    assert [len(split) for split in splits] == [26, 5, 5]  # 4 ages are unknown
    assert sorted(torch.cat(splits).tolist()) == [number for number in range(40) if number % 10 != 5]
    assert len(torch.cat([tensors(loaded(path), split)["label"] for split in ("train", "val", "test")])) == 39
    assert not torch.equal(tensors(loaded(path, seed=1))["features"], tensors(loaded(path, seed=2))["features"])


def test_facts_of_a_classification_and_of_a_regression(tmp_path: Path) -> None:
    path = people(tmp_path)
    facts = module(path).facts()
    assert (facts["classes"], facts["num_outputs"], facts["target_scale"]) == (["no", "yes"], 2, None)
    assert facts["num_features"] == tensors(loaded(path))["features"].shape[1] == 2 + 4 + 1 + 1
    facts = module(path, target="income", task="regression").facts()
    target = tensors(loaded(path, target="income", task="regression"))["target"]
    assert (facts["classes"], facts["num_outputs"]) == (None, 1)
    assert facts["target_scale"] == pytest.approx([target.mean().item(), target.std(correction=0).item()])


def test_classes_that_are_numbers_are_ordered_by_value(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", ["a", "grade"], [[number, [2, 10, 9][number % 3]] for number in range(30)])
    datamodule = loaded(path, target="grade")
    assert datamodule.facts()["classes"] == ["2", "9", "10"]
    assert set(tensors(datamodule)["label"].tolist()) == {0, 1, 2}


def test_later_rows_become_features_as_the_training_rows_did(tmp_path: Path) -> None:
    path = people(tmp_path)
    facts = module(path).facts()
    first = tensors(loaded(path, **facts))
    later = write_csv(
        tmp_path / "later.csv", ["city", "age", "code", "income"], [["Rome", 30, 1, ""], ["Oslo", 0, 0, 5]]
    )
    datamodule = loaded(later, stage="predict", **facts)
    (batch,) = datamodule.predict_dataloader()
    assert batch.keys() == {"features"}
    age, income = facts["columns"][0], facts["columns"][3]
    expected = [(30 - age["mean"]) / age["std"], 0, 0, 0, 0, 0]  # Rome is unknown
    assert batch["features"][0, :6].tolist() == pytest.approx(expected)
    assert batch["features"][0, 7] == 0
    assert batch["features"][1, 7].item() == pytest.approx((5 - income["mean"]) / income["std"])
    assert torch.equal(first["features"], tensors(loaded(path))["features"])


def test_parquet_holds_the_same_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = people(tmp_path)
    columns = {name: column.tolist() for name, column in read_table(path).items()}
    columns = {
        name: [None if value is None or value != value else value for value in column]  # NaN differs from itself
        for name, column in columns.items()
    }
    columns["code"] = [bool(value) for value in columns["code"]]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "people.parquet")
    of_csv, of_parquet = (tensors(loaded(tmp_path / f"people.{kind}", drop=["code"])) for kind in ("csv", "parquet"))
    assert torch.equal(of_csv["features"], of_parquet["features"])
    assert torch.equal(of_csv["label"], of_parquet["label"])
    (code,) = module(tmp_path / "people.parquet", drop=["age", "city", "income"]).facts()["columns"]
    assert code["values"] == ["False", "True"]


def test_separators_and_marks_of_spreadsheets_are_read(tmp_path: Path) -> None:
    rows = [[number, f'"{number}; ""x"""', "NaN"] for number in range(3)]
    path = write_csv(tmp_path / "x.csv", ["\ufeffa", " b ", "c"], rows, delimiter=";")
    table = read_table(path, ";")
    assert list(table) == ["a", "b", "c"]
    assert table["b"].tolist() == ['0; "x"', '1; "x"', '2; "x"']
    assert np.isnan(table["c"]).all()
    tabs = write_csv(tmp_path / "x.tsv", ["a", "b"], [[1, 2]], delimiter="\t")
    assert read_table(tabs)["b"].tolist() == [2]


def test_the_default_table_is_real_and_can_be_told_apart() -> None:
    datamodule = loaded(None, target="diagnosis")
    facts = datamodule.facts()
    assert (facts["num_features"], facts["classes"]) == (30, ["benign", "malignant"])
    batch = next(iter(datamodule.train_dataloader()))
    assert batch["features"].shape == (4, 30)
    assert batch["label"].dtype == torch.int64


FINE = [[number, CITIES[number % 3], number % 2] for number in range(30)]


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("a,b,t\n1,x", {}, "line 2, has 2 values under 3 names: mend it, or type another data.delimiter="),
        ("a,a,t\n1,2,3", {}, "has two columns a: give each a name of its own"),
        ("", {}, "has no rows"),
        ("a,b,t\n", {}, "has no rows"),
        (
            None,
            {"target": "price"},
            "data.target=price is no column of .*, whose columns are a, b, t: type data.target=",
        ),
        (None, {"drop": ["z"]}, "data.drop=z is no column"),
        (None, {"categorical": ["z"]}, "data.categorical=z is no column"),
        (None, {"drop": ["a", "b"]}, "no column besides the target"),
        (
            None,
            {"target": "a"},
            "30 different values in 30 rows, too many for classes: type experiment=tabular_regress",
        ),
        (
            None,
            {"target": "b", "task": "regression"},
            "column b, row 1: Oslo is no finite number: mend it, or type exp",
        ),
        ((17, 0, "old"), {}, r"column a, row 17: old is no finite number: .* data.categorical=\[a\].* data.drop=\[a\]"),
        ((17, 0, "inf"), {}, "column a, row 17: inf is no finite number"),
        ((0, 2, 1), {}, "column t is 1 in all rows"),
        (None, {"max_categories": 2, "drop": ["a"], "long": True}, r"another text in each of .* type data.drop=\[b\]"),
    ],
)
def test_junk_is_told_with_its_place(tmp_path: Path, text: Any, arguments: dict[str, Any], words: str) -> None:
    rows = [list(row) for row in FINE]
    if arguments.pop("long", False):
        rows = [[a, f"text {a}", t] for a, _, t in rows]
    if isinstance(text, tuple):
        row, column, value = text
        for place in [row - 1] if row else range(30):
            rows[place][column] = value
    path = write_csv(tmp_path / "x.csv", ["a", "b", "t"], rows)
    if isinstance(text, str):
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        loaded(path, **{"target": "t"} | arguments)


def test_files_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.csv is no file: type data.path="):
        loaded(tmp_path / "nowhere.csv")
    (tmp_path / "x.xlsx").touch()
    with pytest.raises(ValueError, match=r"must end in .csv, .tsv or .parquet"):
        loaded(tmp_path / "x.xlsx")
    (tmp_path / "x.csv").write_bytes(b"a,b\n\xff\xfe\xff,1")
    with pytest.raises(ValueError, match=r"x.csv can't be read .*: save it as CSV in UTF-8"):
        loaded(tmp_path / "x.csv")
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match="x.parquet is no Parquet file"):
        loaded(tmp_path / "x.parquet")


def test_rows_that_do_not_fit_the_training_rows_are_told(tmp_path: Path) -> None:
    path = people(tmp_path)
    facts = module(path).facts()
    lacking = write_csv(tmp_path / "lacking.csv", ["age", "code", "income", "buys"], [[1, 2, 3, "no"]] * 20)
    with pytest.raises(ValueError, match="has no column city, which features are made of"):
        loaded(lacking, **facts)
    path.write_text(path.read_text().replace("yes", "perhaps"))
    with pytest.raises(ValueError, match="column buys holds perhaps, which is none of the classes no, yes"):
        loaded(path, **facts)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"task": "ranking"}, "type data.task=classification or data.task=regression"),
        ({"max_categories": 0}, "type data.max_categories=64"),
        ({"delimiter": "||"}, 'type data.delimiter=";"'),
        ({"val_fraction": 0.0}, "type data.val_fraction=0.15"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        TabularDataModule(**arguments)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(tabular, "notice", lines.append)
    return lines


def test_what_changes_the_features_is_told(tmp_path: Path, told: list[str]) -> None:
    rows = [[0.1, "", number, CITIES[number % 3], number % 2] for number in range(40)]
    path = write_csv(tmp_path / "x.csv", ["same", "none", "a", "b", "t"], rows)
    held_out = int(tensors(loaded(path, target="t"), "test")["features"].shape[0])
    assert told == ["Left out, because they are the same in all training rows: same, none"]
    facts = module(path, target="t").facts()
    assert [column["name"] for column in facts["columns"]] == ["a", "b"]
    assert held_out == 6
    told.clear()
    rows[loaded(path, target="t")._rows["test"][0] - 1][3] = "Rome"
    rows[0][4] = ""
    told.clear()
    changed = write_csv(tmp_path / "y.csv", ["same", "none", "a", "b", "t"], rows)
    loaded(changed, stage="predict", target="t", **facts)
    assert told == [
        "Column b: 1 rows outside of training hold names that have no feature, as Rome, and get 0 in all of that column"
    ]
    told.clear()
    loaded(changed, target="t", **facts)
    assert "Left out: 1 of 40 rows, which have no t" in told


def test_a_class_without_a_training_row_is_told(tmp_path: Path, told: list[str]) -> None:
    rows = [[number, number % 2] for number in range(40)]
    path = write_csv(tmp_path / "x.csv", ["a", "t"], rows)
    rows[loaded(path, target="t")._rows["test"][0] - 1][1] = 2
    loaded(write_csv(path, ["a", "t"], rows), target="t")
    assert told == ["Classes without a training row, which can't be learned: 2"]


def test_predicted_samples_have_their_rows_of_the_file(tmp_path: Path) -> None:
    rows = [[number, number % 2 if number != 3 else ""] for number in range(40)]
    datamodule = loaded(write_csv(tmp_path / "x.csv", ["a", "t"], rows), target="t")
    (column,) = datamodule.facts()["columns"]
    numbers = tensors(datamodule, "test")["features"][:, 0] * column["std"] + column["mean"]
    of_file = datamodule.sample_columns(list(range(len(numbers))))["row"]
    assert [number + 1 for number in numbers.round().int().tolist()] == of_file


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_another_delimiter_is_named(tmp_path: Path, mark: str) -> None:
    path = write_csv(tmp_path / "x.csv", ["a", "t"], [[1, 2]], delimiter=mark)
    with pytest.raises(ValueError, match="has one column, .*: type 'data.delimiter="):
        read_table(path)
    assert list(read_table(path, mark)) == ["a", "t"]
