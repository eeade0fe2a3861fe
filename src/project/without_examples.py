"""The project without its examples: without the files listed in without_examples.txt, and marked passages of others.

Where a file that stays speaks of an example, it marks the passage: a line ends in the comment ``example``, or lines
stand between the comments ``examples`` and ``/examples``. In Markdown these are HTML comments, also within a line.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from project.errors import UserError

LIST = Path("src", Path(__file__).parent.name, "without_examples.txt")
LEFT_OUT = "left_out.txt"  # beside it, in a project without examples: the configs that went, as GROUP/CHOICE
CHANGES = Path("CHANGELOG.md")
OWN_CHANGES = "# Changes\n\n## 0.1.0, unreleased\n\n- Made from a template.\n"
WHAT = "the notebooks, all experiments but the default one, and the data and models that only those use"
PASSAGES = (
    r"^[^\S\n]*<!-- examples -->\n.*?^[^\S\n]*<!-- /examples -->\n\n?",
    r"<!-- examples -->.*?<!-- /examples -->",
    r"^[^\S\n]*# examples\n.*?^[^\S\n]*# /examples\n",
    r"^[^\n]*\S  # example\n",
)


def listed(root: Path) -> list[str]:
    """The examples' files and folders, relative to ``root``; folders end in a slash.

    Raises:
        UserError: the project has no such list.
    """
    if not (root / LIST).is_file():
        raise UserError(f"{root} has no {LIST}, the list of its examples: leave --without-examples out")
    lines = (root / LIST).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_example(path: Path, examples: list[str]) -> bool:
    """Whether a file, relative to the project, is listed or lies in a folder that is."""
    return any(path.is_relative_to(name) if name.endswith("/") else path == Path(name) for name in examples)


def without_passages(text: str) -> str:
    """The text without its marked passages."""
    for pattern in PASSAGES:
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


def leave_out(folder: Path, paths: list[Path]) -> list[Path]:
    """Take the examples out of the project in ``folder``, which has these files; the files that stay.

    The template's changes give way to the project's own, and ``LEFT_OUT`` remembers the choices that went.
    """
    examples = listed(folder)
    kept = [path for path in paths if not is_example(path, examples)]
    for path in set(paths) - set(kept):
        (folder / path).unlink()
        with contextlib.suppress(OSError):  # there are other files in one
            for parent in list(path.parents)[:-1]:
                (folder / parent).rmdir()
    for path in kept:
        try:
            text = (folder / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        if (stripped := without_passages(text)) != text:
            (folder / path).write_text(stripped, encoding="utf-8")
        if path == CHANGES:
            (folder / path).write_text(OWN_CHANGES, encoding="utf-8")
    choices = [path.removeprefix("conf/").removesuffix(".yaml") for path in examples if path.startswith("conf/")]
    why = "# Configs of the template that this project was made without: who types one is told so."
    (folder / LIST).with_name(LEFT_OUT).write_text("\n".join([why, *choices]) + "\n", encoding="utf-8")
    return kept
