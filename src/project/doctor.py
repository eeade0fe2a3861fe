"""Is this machine ready to train? A tick, a warning or a cross for each thing, with what to type to mend it.

python -m project.doctor
python -m project.doctor --ranks 8 --outputs /data/outputs
python -m project.doctor --no-speed --json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from project.checkup.finding import Finding, Status
from project.console import shows, spare_encoding
from project.examples import Parser, split_doc

MARKS = {Status.GOOD: "[green]✓[/]", Status.WARNING: "[yellow]![/]", Status.BROKEN: "[red]✗[/]"}
IN_ASCII = {"✓": "+", "✗": "x"}
START_S = 60  # at most, for ranks that import torch, beside other work
RANK_S = 4  # more for each, where there are more of them than cores
Section = tuple[str, Callable[[], Iterator[Finding]]]


def main() -> None:
    """Look at everything, tell it, and exit with 1 if something that is needed is broken."""
    parser = Parser(
        prog="project.doctor",
        description="Is this machine ready to train? Exit code 1 if something that is needed is broken.",
    )
    parser.examples, _ = split_doc(__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="where runs will be written")
    parser.add_argument(
        "--ranks", type=int, help="ranks of the largest all-reduce; default: GPUs, or CPU cores up to 4"
    )
    parser.add_argument(
        "--no-speed", action="store_true", help="leave out what is measured: products, copies, all-reduce"
    )
    spare_encoding()
    arguments = parser.parse_args()
    if arguments.ranks is not None and not 2 <= arguments.ranks <= 64:
        parser.error(f"--ranks {arguments.ranks}: type a number from 2 to 64")

    found: list[tuple[str, Finding]] = []
    for section, check in _sections(arguments.outputs, arguments.ranks, not arguments.no_speed):
        if not arguments.json:
            _print(f"[bold]{section}[/]")
        for finding in check():
            found.append((section, finding))
            if not arguments.json:
                _print_finding(finding)

    is_ready = all(finding.status != Status.BROKEN for _, finding in found)
    if arguments.json:
        print(json.dumps({"ready": is_ready, "findings": [{"section": s} | asdict(f) for s, f in found]}, indent=2))
    else:
        _print(_verdict([finding for _, finding in found]))
    sys.exit(0 if is_ready else 1)


def _sections(outputs: Path, num_ranks: int | None, measure: bool) -> Iterator[Section]:
    """What is looked at, in order: each needs only what was found good before."""
    from project.checkup import host, packages

    yield "Packages", packages.check
    try:
        import torch
    except Exception as error:  # a broken build raises anything, and is what we are here to tell
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = "pip install --force-reinstall torch"
        yield "Devices", lambda: iter([Finding("torch", f"import fails: {message}", Status.BROKEN, remedy)])
        yield "Host", partial(host.check, outputs, 0)
        return
    from project.checkup import all_reduce, devices, speed

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield "Devices", devices.check
    yield "Host", partial(host.check, outputs, num_gpus)
    if measure:
        yield "Speed", speed.check
        most = num_ranks or num_gpus or min(4, os.cpu_count() or 1)
        if most > 1:
            yield "Ranks", partial(all_reduce.check, most, START_S + RANK_S * most)


def _print_finding(finding: Finding) -> None:
    from rich.markup import escape

    mark = MARKS[finding.status]
    for sign, plain in IN_ASCII.items():
        mark = mark if shows(sign) else mark.replace(sign, plain)
    _print(f"  {mark} {escape(finding.name)}: {escape(finding.value)}")
    if finding.remedy:
        _print(f"      [bold]{escape(finding.remedy)}[/]")


def _verdict(found: list[Finding]) -> str:
    broken = sum(finding.status == Status.BROKEN for finding in found)
    warnings = sum(finding.status == Status.WARNING for finding in found)
    if broken:
        return f"[red]Not ready:[/] {broken} broken, {warnings} to look at."
    return f"[green]Ready[/]{f', with {warnings} to look at' if warnings else ''}."


def _print(text: str) -> None:
    from rich import get_console

    get_console().print(text, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
