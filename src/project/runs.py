"""The ledger: what ran, what came of it, and how runs differ.

python -m project.runs list
python -m project.runs best --metric test/f1
python -m project.runs compare lr=0.1 lr=0.01
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from project.console import spare_encoding
from project.errors import UserError
from project.examples import Parser, split_doc

DESCRIPTION = """Find runs again. RUNS are run folders, folders that hold such (a sweep, an experiment), or words
that a run's folder or overrides contain; by default all below OUTPUTS."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shared = Parser(add_help=False)
    shared.add_argument("--outputs", type=Path, default=Path("outputs"), help="where runs are looked for (%(default)s)")
    shared.add_argument("--format", choices=("table", "markdown", "csv"), default="table", help="(%(default)s)")
    shared.add_argument("--metric", help="compare by this metric, not by what each run monitored")
    shared.add_argument("--mode", choices=("min", "max"), help="whether less or more of it is better")
    top = Parser(prog="python -m project.runs", description=DESCRIPTION)
    top.examples, _ = split_doc(__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[shared], help=text, description=text)

    add("list", "one row a run, the newest first").add_argument("runs", nargs="*", metavar="RUNS")
    best = add("best", "finished runs, the best first")
    best.add_argument("runs", nargs="*", metavar="RUNS")
    best.add_argument("-n", type=int, default=10, help="rows (%(default)s)")
    compare = add("compare", "what differs in config and metrics")
    compare.add_argument("runs", nargs="+", metavar="RUN")
    add("report", "results.csv, best.yaml and figures of a sweep, also of one in progress").add_argument(
        "sweep", type=Path, metavar="SWEEP"
    )
    board = add("tensorboard", "open exactly these runs in TensorBoard")
    board.add_argument("runs", nargs="+", metavar="RUNS")
    board.add_argument("--port", type=int, default=6006, help="(%(default)s)")
    return top


def run(arguments: argparse.Namespace) -> None:
    """What a command does.

    Raises:
        UserError: no run is meant, or files can't be read.
    """
    # Imported here, so that --help answers at once.
    from project.launch.summary import shorten
    from project.sweep import ledger

    if arguments.command == "report":
        from project.sweep.record import read
        from project.sweep.report import write_report

        write_report(read(arguments.sweep))
        return
    runs = ledger.find(arguments.runs, arguments.outputs)
    if arguments.command == "tensorboard":
        from project.sweep.tensorboard import serve

        serve(runs, arguments.port)
        return
    if arguments.command == "compare":
        header, body = ledger.compare(runs)
        if arguments.format == "table":
            parent, names = ledger.short_names(runs)
            print(f"Runs in {shorten(parent)}:")
            header = ["", *names]
    elif arguments.command == "best":
        header, body = ledger.overview(ledger.best(runs, arguments.metric, arguments.mode)[: arguments.n])
    else:
        if arguments.metric:
            runs = [ledger.by_metric(one, arguments.metric) for one in runs]
        header, body = ledger.overview(sorted(runs, key=lambda one: one.started_at, reverse=True))
    print(ledger.rendered(header, body, arguments.format), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    spare_encoding()
    try:
        run(parser().parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
