"""Make the template yours: the same project under another package name, in a new folder or in place.

python -m project.rename my_lab ../my-lab
python -m project.rename my_lab ~/work/my-lab && make --directory ~/work/my-lab test
python -m project.rename my_lab
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from project.errors import UserError
from project.examples import Parser, split_doc
from project.without_examples import LIST, WHAT, leave_out, listed

OLD = __name__.partition(".")[0] if __name__ != "__main__" else Path(__file__).parent.name
ROOT = Path(__file__).parents[2]
TOP_LEVEL = ("conf", "src", "tests", "notebooks")
LEFT_OUT = ("outputs", "multirun", ".venv", "venv", ".git", "build", "dist", "data")  # at the top
CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints")


def main() -> None:
    """Check the name, copy or move, and say what to type next."""
    parser = Parser(prog=f"{OLD}.rename", description="The same project under another package name.")
    parser.examples, _ = split_doc(__doc__)
    parser.add_argument("name", help="of the package, as in: import NAME")
    parser.add_argument("folder", type=Path, nargs="?", help="a new folder to copy to; without it, rename in place")
    has_examples = (ROOT / LIST).is_file()
    text = f"leave out {WHAT}, with their tests and what the README says of them"
    parser.add_argument("--without-examples", action="store_true", help=text if has_examples else argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        check_name(arguments.name)
        if not (ROOT / "pyproject.toml").is_file():
            raise UserError(f"{ROOT} holds no clone of the project: run this from one, with pip install -e .")
        if arguments.without_examples:
            listed(ROOT)  # there is such a list, or nothing is begun
        folder = arguments.folder or ROOT
        if arguments.folder is None:
            check_clean(ROOT)
        with nullcontext(ROOT) if arguments.folder is None else whole(folder) as place:
            paths = list(files(ROOT)) if arguments.folder is None else copy(ROOT, place)
            number = len(paths)
            if arguments.without_examples:
                paths = leave_out(place, paths)
            changed = rename(place, paths, arguments.name)
            tidy(place)
    except UserError as error:
        sys.exit(f"error: {error}")
    done = f"copied to {folder}" if arguments.folder else "looked through"
    left = f" and {number - len(paths)} of the examples left out" if arguments.without_examples else ""
    print(f"{len(paths)} files {done}{left}; in {changed} of them {OLD} became {arguments.name}. Next:")
    print(f"    cd {folder}")
    if arguments.folder is not None:  # without git a run can't record of which code it is
        print(f"    git init && git add --all && git commit --message 'Begin {arguments.name}'")
    print(f"    make test    # or: pip install -e '.[dev]' && python -m {arguments.name}.train")


def check_name(name: str) -> None:
    """Check that a package can have the name.

    Raises:
        UserError: it is no identifier, or other code has it already.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise UserError(f"{name} is no name for a package: type letters, digits and _, a letter first, as my_lab")
    if name in (OLD, *TOP_LEVEL):
        raise UserError(f"{name} is the name of a folder of this project already: type another, as {name}_lab")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise UserError(
            f"{name} would hide the module of that name which Python has already: type another, as {name}_lab"
        )


def check_clean(root: Path) -> None:
    """Check that what is about to change could be taken back.

    Raises:
        UserError: there are changes that git has not kept, or no git.
    """
    status = _git(root, "status", "--porcelain")
    if status is None or status.strip():
        reason = "is not kept by git" if status is None else "has changes that are not committed"
        raise UserError(
            f"{root} {reason}: commit first (or git checkout ., after a rename that was cut off), or type a folder to "
            f"copy to, as {OLD}.rename my_lab ../my-lab"
        )


def files(root: Path) -> Iterator[Path]:
    """What belongs to the project, relative to ``root``: what git keeps or would, else all but caches and outputs."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        yield from (Path(name) for name in listed.split("\0") if name and (root / name).is_file())
        return
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and relative.parts[0] not in LEFT_OUT and not set(CACHES) & set(relative.parts):
            yield relative


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A place beside a new folder, which becomes that folder when all is done, and goes if anything fails.

    Raises:
        UserError: the folder is not empty, within the project, or can't be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty: type a new folder")
    if folder.resolve().is_relative_to(ROOT):
        raise UserError(f"{folder} is within {ROOT}: type a folder outside of it, as ../my-lab")
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
            place = Path(beside) / folder.name
            yield place
            place.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} can't be written ({error.strerror}): type another folder") from error


def copy(root: Path, folder: Path) -> list[Path]:
    """Copy the project's files; their paths there."""
    paths = list(files(root))
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, folder / path)
    return paths


def rename(folder: Path, paths: list[Path], name: str) -> int:
    """Change the package's name in all files and move its folder; how many files changed."""
    changed = 0
    for path in paths:
        try:
            text = (folder / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        renamed = renamed_text(text, name, is_toml=path.suffix == ".toml")
        if renamed != text:
            (folder / path).write_text(renamed, encoding="utf-8")
            changed += 1
    (folder / "src" / OLD).rename(folder / "src" / name)
    return changed


def renamed_text(text: str, name: str, is_toml: bool = False) -> str:
    """The text with the package's name changed, and the English word left alone.

    The name is what stands before a dot and a name, in a path, in an import, before the name of a command, and
    alone in quotes.
    """
    old_command, command = OLD.replace("_", "-"), name.replace("_", "-")
    table = r"(?<!\[)" if is_toml else ""  # [project.scripts] is a table of pyproject.toml
    for pattern, new in (
        (rf"{table}\b{OLD}(?=\.[\w{{<*]|\\\.[\w(]|\(\\\.)", name),  # in regular expressions too
        (rf"(?<=\"){OLD}(?=\\{{0,2}}\[)", name),  # pip install "project[extra]"
        (rf"(\.cache|\.config|HOME)/{OLD}\b", rf"\1/{name}"),
        (rf"\b(from|import) {OLD}\b", rf"\1 {name}"),
        (rf"\bsrc/{OLD}\b", f"src/{name}"),
        (rf"(?<![\w-]){OLD}(?=/(?:conf|[a-z_]+\.py\b|[a-z_]+/|\{{|data\b|launch\b|tracking\b))", name),
        (rf"(?<=[\"'`]){OLD}(?=[\"'`])", name),
        (rf"\b{old_command}-(?=(?:train|evaluate|predict|benchmark|doctor|runs|rename)\b|\{{)", f"{command}-"),
        (rf"(?m)^# {OLD}$", f"# {name}"),
    ):
        text = re.sub(pattern, new, text)
    return text


def tidy(folder: Path) -> None:
    """Sort imports and break lines as the new name wants it, where ruff is installed; texts too long are marked."""
    if importlib.util.find_spec("ruff") is not None:
        for command in (
            ["check", "--select=I", "--fix"],
            ["format"],
            ["check", "--select=E501", "--add-noqa"],
            ["check", "--fixable=RUF100", "--fix"],  # marks that a longer name had needed
        ):
            ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache"]
            subprocess.run(ruff, cwd=folder, capture_output=True, check=False)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout if result.returncode == 0 else None


if __name__ == "__main__":
    main()
