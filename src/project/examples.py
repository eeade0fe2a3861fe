"""The examples in a command's docstring, with which its help begins."""

from __future__ import annotations

import argparse


def split_doc(doc: str | None) -> tuple[str, str]:
    """The examples in a docstring, its lines that begin with ``python -m``, and the rest of it."""
    lines = (doc or "").strip().splitlines()
    examples = [line for line in lines if line.startswith("python -m ")]
    return "\n".join(examples), "\n".join(line for line in lines if line not in examples).strip()


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with examples; parsers of its own commands have none."""

    examples = ""

    def format_help(self) -> str:
        return f"{self.examples}\n\n{super().format_help()}" if self.examples else super().format_help()
