"""The commands, overrides and Python files that the README shows."""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
COMMANDS = "train|evaluate|predict|benchmark|runs|doctor|rename"
PROGRAM = rf"(\$ )?(python3?|pip|make|torchrun|srun|tensorboard|mlflow|wandb|[\w-]+-({COMMANDS})|\.ci/run)( |$)"
FENCE = "```"


@dataclass(frozen=True)
class Shown:
    """A command as it would be typed, and what the README shows that it prints."""

    text: str
    output: str = ""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The blocks of code, each with its language: that of its fence, none if it is indented."""
    fence: str | None = None
    kinds = []
    for line in text.splitlines():
        kind = fence if fence is not None else "" if line.startswith("    ") else None
        if line.startswith(FENCE):
            fence, kind = (None if fence is not None else line.removeprefix(FENCE).strip()), None
        kinds.append((kind, line if fence is not None else line.removeprefix("    ")))
    for kind, lines in groupby(kinds, key=lambda pair: pair[0]):
        if kind is not None:
            yield kind, [line for _, line in lines]


def commands(text: str) -> list[Shown]:
    """Every command once: lines of blocks, and code within sentences that begins with a program.

    A block with a command holds nothing but commands; after one that follows ``$`` comes what it prints. Other blocks
    are files and outputs, as long as their first word is no program of this machine.
    """
    found = []
    for language, lines in blocks(text):
        if language not in ("", "bash", "sh", "console"):
            continue
        whole = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
        lines = [line for line in whole.splitlines() if line.split("#")[0].strip()]
        if lines[0].startswith("$ "):
            found.append(Shown(lines[0].removeprefix("$ "), "\n".join(lines[1:])))
        elif any(re.match(PROGRAM, line) for line in lines) or shutil.which(lines[0].split()[0]):
            found += [Shown(line) for line in lines]
    outside = re.sub(rf"(?ms)^{FENCE}.*?^{FENCE}", "", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    found += [Shown(span) for span in spans if re.match(PROGRAM, span) and " " in span]
    without_comments = (Shown(re.sub(r"\s+#.*", "", shown.text), shown.output) for shown in found)
    return list(dict.fromkeys(without_comments))


def overrides(text: str) -> list[str]:
    """Code within sentences and tables that is what one adds to a command, as ``-m trainer.devices=1,2``."""
    outside = re.sub(rf"(?ms)^{FENCE}.*?^{FENCE}|^    .*?$", "", text)
    spans = dict.fromkeys(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside))
    word = r"""(-m|'?[+~]?[a-z_]+([./][\w./]+)?=('[^']*'|[^\s=]+)+)"""
    return [span for span in spans if re.fullmatch(rf"{word}( {word})*", span)]


def python_files(text: str) -> dict[str, str]:
    """The blocks of Python that begin with the comment ``# NAME.py``, by that name."""
    found = ["\n".join(lines) for language, lines in blocks(text) if language == "python"]
    named = ((re.match(r"# (\w+\.py)\b", code), code) for code in found)
    return {match.group(1): code for match, code in named if match}
