"""A copy without the examples: what is listed is there, and what stays speaks of nothing that is left out."""

import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from project import rename
from project.errors import UserError
from project.rename import ROOT
from project.without_examples import LEFT_OUT, LIST, is_example, leave_out, listed, without_passages

EXAMPLES = listed(ROOT)
CODE = LIST.with_name("train.py")
FILES = list(rename.files(ROOT))
KEPT = [path for path in FILES if not is_example(path, EXAMPLES)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from a import b\nfrom a import c  # example\nfrom a import d\n", "from a import b\nfrom a import d\n"),
        ('names = [\n    "b",\n    "c",  # example\n]\n', 'names = [\n    "b",\n]\n'),
        ("a\n\n\n# examples\ndef b(): ...\n\n\n# /examples\ndef c(): ...\n", "a\n\n\ndef c(): ...\n"),
        ("a = [\n    # examples\n    1,\n    # /examples\n    2,\n]\n", "a = [\n    2,\n]\n"),
        ("Text.\n\n<!-- examples -->\n## Of one\n\nMore.\n\n<!-- /examples -->\nNext.\n", "Text.\n\nNext.\n"),
        ("Text.\n\n<!-- examples -->\nMore.\n<!-- /examples -->\n\nNext.\n", "Text.\n\nNext.\n"),
        ("| `a`, <!-- examples -->`b`, <!-- /examples -->`c` |\n", "| `a`, `c` |\n"),
        ("# examples are told here\nx  # an example\n# example\n", None),
    ],
)
def test_marked_passages_go_and_the_rest_stays(before: str, after: str | None) -> None:
    assert without_passages(before) == (before if after is None else after)


def test_listed_files_and_folders_go_and_folders_that_are_empty_then(tmp_path: Path) -> None:
    texts = {
        str(LIST): f"# Why.\n{LIST}\n\nnotebooks/\nconf/data/a.yaml\n",
        "notebooks/deep/one.ipynb": "{}",
        "conf/data/a.yaml": "a: 1\n",
        "conf/data/a.yaml.md": "kept",
        str(CODE): "pass\n",
        "README.md": "b\nc  <!-- examples -->d<!-- /examples -->\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\xff")
    kept = leave_out(tmp_path, [Path(name) for name in (*texts, "picture")])
    assert [str(path) for path in kept] == ["conf/data/a.yaml.md", str(CODE), "README.md", "picture"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"conf/data/a.yaml.md", str(CODE), "README.md", "picture", str(LIST.with_name(LEFT_OUT))}
    assert (tmp_path / LIST).with_name(LEFT_OUT).read_text().splitlines()[1:] == ["data/a"]
    assert (tmp_path / "README.md").read_text() == "b\nc  \n"
    assert not (tmp_path / "notebooks").exists()


def test_it_says_what_was_done_and_the_changes_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = rename.OLD
    texts = {
        str(LIST): f"{LIST}\nnotebooks/\n",
        "notebooks/one.ipynb": "{}",
        "pyproject.toml": f'name = "{old}"\n',
        f"src/{old}/train.py": f"import {old}\n",
        "CHANGELOG.md": "# Changes\n\n- What the template did.\n",
    }
    for name, text in texts.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(rename, "ROOT", tmp_path / "root")
    monkeypatch.setattr(sys, "argv", ["rename", f"{old}_copy", str(tmp_path / "copy"), "--without-examples"])
    rename.main()
    told = f"3 files copied to {tmp_path / 'copy'} and 2 of the examples left out; "
    assert f"{told}in 2 of them {old} became {old}_copy. Next:\n" in capsys.readouterr().out
    assert "What the template did" not in (tmp_path / "copy" / "CHANGELOG.md").read_text()
    assert (tmp_path / "copy" / "src" / f"{old}_copy" / LEFT_OUT).is_file()


def test_no_settings_speak_of_notebooks_that_are_not_there() -> None:
    for name in ("pyproject.toml", "Makefile", ".gitignore", "tests/conftest.py"):
        assert "notebook" not in without_passages((ROOT / name).read_text()).lower()


def test_a_copy_has_no_examples_to_leave_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the list of its examples: leave --without-examples out"):
        listed(tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_listed_is_there(name: str) -> None:
    assert [path for path in FILES if is_example(path, [name])], f"take {name} out of {LIST}"


def test_every_experiment_but_the_default_is_an_example() -> None:
    defaults = OmegaConf.load(ROOT / "conf" / "train.yaml")["defaults"]  # type: ignore[index]
    (default,) = (entry["experiment"] for entry in defaults if "experiment" in entry)
    kept = {path.stem for path in KEPT if path.parent == Path("conf/experiment")}
    assert kept == {default, "none"}


def test_what_stays_names_no_example() -> None:
    """Neither a choice, as in ``data=mnist``, nor a module, nor a file; and no mark is without its other half."""
    names = [name for name in EXAMPLES if name != str(LIST) and not name.endswith("/")]
    chosen = [match.groups() for name in names if (match := re.fullmatch(r"conf/(.*)/(\w+)\.yaml", name))]
    modules = [name[4:-3].replace("/", ".") for name in names if re.fullmatch(r"src/.*\.py", name)]
    gone = [*names, *modules, *(f"{group}{sign}{option}" for group, option in chosen for sign in ("=", ": "))]
    found = {}
    for path in KEPT:
        if path.suffix != ".png":
            text = without_passages((ROOT / path).read_text(encoding="utf-8"))
            half_marks = re.findall(r"<!-- /?examples -->|^ *# /?examples$|# example$", text, re.MULTILINE)
            found[str(path)] = [*half_marks, *(name for name in gone if name in text)]
    found = {path: names for path, names in found.items() if names}
    assert found == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_copy_without_examples_passes_its_checks_and_tests_and_trains(tmp_path: Path) -> None:
    name, copied = f"{rename.OLD}_two", tmp_path / "copied"
    command = [sys.executable, "-m", f"{rename.OLD}.rename", name, str(copied), "--without-examples"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    venv.create(tmp_path / "venv")
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "base.pth").write_text("\n".join([str(copied / "src"), *site.getsitepackages()]))
    python = str(tmp_path / "venv" / "bin" / "python")
    some = "test_composition or test_facts or test_nets or test_synthetic"  # of all, which are read for it
    for arguments in (
        ["-m", "ruff", "check", "--no-cache"],
        ["-m", "ruff", "format", "--check", "--no-cache"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", some],
        ["-m", f"{name}.train", "debug=fast", "trainer.accelerator=cpu"],
    ):
        done = subprocess.run([python, *arguments], cwd=copied, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    asked = subprocess.run(
        [python, "-m", f"{name}.train", "experiment=mnist_cnn"], capture_output=True, text=True, check=False
    )
    assert "which this project was made without (rename --without-examples)" in asked.stderr
    refused = subprocess.run(
        [python, "-m", f"{name}.rename", "third", str(tmp_path / "third"), "--without-examples"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert re.match(r"error: .* has no src/\w+/without_examples.txt.*: leave --without-examples out\n", refused.stderr)
    assert not (tmp_path / "third").exists()
