"""The same project under another name."""

import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from project import rename
from project.errors import UserError


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from project.launch import rank", "from my_lab.launch import rank"),
        ("import project\n", "import my_lab\n"),
        ("_target_: project.data.Digits", "_target_: my_lab.data.Digits"),
        ("python -m project.train x=1", "python -m my_lab.train x=1"),
        ("src/project/train.py, project/conf", "src/my_lab/train.py, my_lab/conf"),
        ('known-first-party = ["project"]', 'known-first-party = ["my_lab"]'),
        ('project-train = "project.train:main"', 'my-lab-train = "my_lab.train:main"'),
        ('f"project.{command}"', 'f"my_lab.{command}"'),
        ('pip install "project[sweep]"', 'pip install "my_lab[sweep]"'),
        (r"match=r'project\.train'", r"match=r'my_lab\.train'"),
        ("~/.cache/project", "~/.cache/my_lab"),
        (r'match="pip install "project\\[sweep\\]"', r'match="pip install "my_lab\\[sweep\\]"'),
        (f"# {rename.OLD}", "# my_lab"),
        ("What this project is. The project runs; the project's own.", None),
        ("subproject.train, a-project/train, my.projects.train", None),
    ],
)
def test_the_name_changes_and_the_word_stays(before: str, after: str | None) -> None:
    assert rename.renamed_text(before, "my_lab") == (before if after is None else after)


def test_commands_are_renamed_again_after_a_name_with_an_underscore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "OLD", "two_words")
    text = 'two-words-train = "two_words.train:main"\n(f"two-words-{command}")'
    renamed = 'three-new-words-train = "three_new_words.train:main"\n(f"three-new-words-{command}")'
    assert rename.renamed_text(text, "three_new_words") == renamed


def test_tables_of_pyproject_keep_their_names() -> None:
    text = '[project]\nname = "project"\n[project.scripts]\n'
    assert rename.renamed_text(text, "my_lab", is_toml=True) == '[project]\nname = "my_lab"\n[project.scripts]\n'


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-lab", "is no name for a package"),
        ("class", "is no name for a package"),
        ("1st", "is no name for a package"),
        ("", "is no name for a package"),
        ("json", "would hide the module"),
        ("torch", "would hide the module"),
        ("tests", "is the name of a folder"),
        ("project", "is the name of a folder"),
    ],
)
def test_names_that_cant_be_are_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rename.check_name(name)


def test_a_copy_goes_into_a_new_folder_outside(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(UserError, match="not empty: type a new folder"), rename.whole(tmp_path / "there"):
        pass
    with pytest.raises(UserError, match=r"outside of it, as \.\./my-lab"), rename.whole(rename.ROOT / "inside"):
        pass


def test_a_copy_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    for folder in (tmp_path / "new" / "lab", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt), rename.whole(folder) as place:
            place.mkdir()
            (place / "file").touch()
            raise KeyboardInterrupt
        assert not list(folder.glob("*"))
        assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
        with rename.whole(folder) as place:
            place.mkdir()
            (place / "file").touch()
        assert (folder / "file").is_file()


def test_renaming_in_place_wants_all_changes_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not kept by git: commit first"):
        rename.check_clean(tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    rename.check_clean(tmp_path)
    (tmp_path / "new").touch()
    with pytest.raises(UserError, match="has changes that are not committed"):
        rename.check_clean(tmp_path)


def test_without_git_caches_and_outputs_are_left_out(tmp_path: Path) -> None:
    kept = ["README.md", "src/project/a.py", "src/project/data/b.py"]
    for name in (*kept, "src/project/__pycache__/a.pyc", "outputs/run/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path) for path in rename.files(tmp_path)] == kept


def test_imports_are_sorted_and_lines_broken_for_the_new_name(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    (tmp_path / "pyproject.toml").write_text('[tool.ruff]\nline-length = 40\nsrc = ["."]\n')
    (tmp_path / "beside.py").touch()
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a.py").write_text("import beside\nimport a_package\n\nx = beside.f(\n    a_package.g\n)\n")
    rename.tidy(tmp_path)
    assert (tmp_path / "a.py").read_text() == "import a_package\nimport beside\n\nx = beside.f(a_package.g)\n"


def test_marks_of_lines_too_long_go_when_a_shorter_name_does_without(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    (tmp_path / "pyproject.toml").write_text('[tool.ruff.lint]\nselect = ["E501", "F", "RUF"]\n')
    (tmp_path / "a.py").write_text('A = "short"  # noqa: E501\nimport json  # noqa: F401\n')
    rename.tidy(tmp_path)
    assert (tmp_path / "a.py").read_text() == 'A = "short"\nimport json  # noqa: F401\n'


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_renamed_copy_passes_its_tests_and_trains(tmp_path: Path) -> None:
    name, copied = f"{rename.OLD}_two", tmp_path / "copied"  # so that a renamed project's own copy is renamed again
    command = [sys.executable, "-m", f"{rename.OLD}.rename", name, str(copied)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"python -m {name}.train" in result.stdout
    assert not (copied / "src" / rename.OLD).exists()
    # An environment of its own on top of this one's packages: there both names can be installed.
    venv.create(tmp_path / "venv")
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "base.pth").write_text("\n".join(site.getsitepackages()))
    python = str(tmp_path / "venv" / "bin" / "python")
    install = ["--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(copied)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    some = ["tests/test_errors.py", "tests/config/test_composition.py", "tests/config/test_build.py", "tests/checkup"]
    some.append("tests/test_rename.py")
    tests = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *some]
    tested = subprocess.run(tests, cwd=copied, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout[-3000:]
    train = [python, "-m", f"{name}.train", "debug=fast", "trainer.devices=2", "trainer.accelerator=cpu"]
    trained = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert trained.returncode == 0, trained.stderr
    assert list(tmp_path.glob("outputs/*/*/metrics.json"))
