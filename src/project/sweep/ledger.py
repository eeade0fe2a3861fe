"""Run folders as a table: what ran, what came of it, how runs differ."""

from __future__ import annotations

import io
import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from project.config.monitor_mode import direction
from project.console import shows
from project.errors import UserError, did_you_mean
from project.launch import run_state
from project.sweep.jobs import Job
from project.sweep.results import as_csv, objective, read_outcome, read_row

CONFIG = "config.yaml"
LONG = ("state", "overrides")  # columns that may take several lines
FRAME = 3  # of a column: a line and two spaces
LEAST_WIDTH = 6 + FRAME  # of a column
STATE_WIDTH = 32  # of what a failed run said, which gets two lines
ROOMY = 140  # columns of a terminal from which on all but long columns stay whole
BLOCK_WIDTH = 28  # at most, of a run's column where runs are compared on a terminal
Table = tuple[list[str], list[list[Any]]]


@dataclass(frozen=True)
class LedgerRun:
    """A run folder, read. ``value`` is that of ``metric``, which is better when it is ``mode``."""

    folder: Path
    name: str
    state: str
    metric: str
    mode: str
    value: float | None
    duration_s: float | None
    ranks: str
    git: str
    overrides: list[str]
    error: str | None
    started_at: float


def find(selection: Sequence[str], outputs: Path) -> list[LedgerRun]:
    """The runs that are meant: folders, or words that a run's folder or overrides contain.

    Raises:
        UserError: a part of the selection means no run.
    """
    found: dict[Path, LedgerRun] = {}
    everything: list[LedgerRun] | None = None
    for text in selection or [str(outputs)]:
        if Path(text).is_dir():
            chosen = [read(folder, Path(text)) for folder in _run_folders(Path(text))]
        else:
            if everything is None:
                everything = [read(folder, outputs) for folder in _run_folders(outputs)]
            chosen = [run for run in everything if text in (run.name, run.folder.name)] or [
                run for run in everything if text in run.name or any(text in typed for typed in run.overrides)
            ]
        if not chosen:
            names = [run.name for run in everything or []]
            hint = did_you_mean(text, names) or ": type a run folder, or one that holds such, or --outputs FOLDER"
            raise UserError(f"no run is called {text} or lies there{hint}")
        found |= {run.folder.resolve(): run for run in chosen}
    return list(found.values())


def _run_folders(parent: Path) -> list[Path]:
    """Folders with a config and a sign that a run began there, at any depth."""
    return sorted(path.parent for path in parent.rglob(CONFIG) if (path.parent / "overrides.yaml").exists())


def read(folder: Path, below: Path) -> LedgerRun:
    """The run of a folder; its name is the path below ``below``."""
    config = _yaml(folder / CONFIG) or {}
    environment = _json(folder / "environment.json")
    metric, mode = str(config.get("monitor") or ""), str(config.get("mode") or "max")
    found = read_row(Job(0, "", {}, folder), {metric: mode} if metric else {})
    known = run_state.read(folder)
    git = environment.get("git") or {}
    name = folder.name if folder == below else str(folder.relative_to(below))
    return LedgerRun(
        folder=folder,
        name=name,
        # A folder of an older version has no state: without metrics it may still run, or have failed.
        state=found.state if found.state != "waiting" else "unfinished",
        metric=metric,
        mode=mode,
        value=found.objectives[0] if found.objectives else None,
        duration_s=found.duration_s,
        ranks=_ranks(read_outcome(folder)),
        git=f"{str(git.get('commit', ''))[:7]}{'+' if git.get('dirty') else ''}",
        overrides=[str(text) for text in _yaml(folder / "overrides.yaml") or []],
        error=found.error,
        started_at=known.started_at if known else (folder / CONFIG).stat().st_mtime,
    )


def _ranks(outcome: dict[str, Any]) -> str:
    """How many, and the devices of one that drives several, as under dp."""
    devices = outcome.get("num_devices", 1)
    return f"{outcome.get('world_size', '')}{f' with {devices} devices' if devices > 1 else ''}"


def by_metric(run: LedgerRun, metric: str, mode: str | None = None) -> LedgerRun:
    """The run with another metric in place of the one that it monitored."""
    value = objective(read_outcome(run.folder) | {"objective": None}, metric, monitored=False)
    return replace(run, metric=metric, mode=mode or run.mode, value=value)


def best(runs: Iterable[LedgerRun], metric: str | None, mode: str | None) -> list[LedgerRun]:
    """Finished runs with a value, the best first.

    Raises:
        UserError: they monitored different metrics and none was named, none has a value, or it is not known whether
            more of it is better.
    """
    finished = [run for run in runs if run.state == "finished"]
    chosen = [by_metric(run, metric, mode) for run in finished] if metric else finished
    metrics = sorted({run.metric for run in chosen if run.value is not None})
    if not metrics:
        what = f"--metric {metric}" if metric else "what they monitored"
        raise UserError(f"no finished run has a value of {what}: see python -m project.runs list")
    if len(metrics) > 1:
        raise UserError(f"these runs monitored {', '.join(metrics)}: type --metric {metrics[0]}")
    sign = 1 if (mode or _mode(finished, metrics[0])) == "min" else -1
    return sorted((run for run in chosen if run.value is not None), key=lambda run: sign * (run.value or 0))


def _mode(runs: Iterable[LedgerRun], metric: str) -> str:
    """As the runs that monitored a metric say, or else its name."""
    modes = {run.mode for run in runs if run.metric == metric}
    mode = modes.pop() if len(modes) == 1 else direction(metric)
    if mode is None:
        raise UserError(f"whether more or less of {metric} is better is not known: type --mode max or --mode min")
    return mode


def overview(runs: Sequence[LedgerRun]) -> Table:
    """One row a run."""
    header = ["run", "state", "metric", "value", "seconds", "ranks", "git", "overrides"]
    body: list[list[Any]] = [
        [
            run.name,
            f"{run.state}: {run.error}" if run.error else run.state,
            *_shown(run),
            None if run.duration_s is None else f"{run.duration_s:.1f}",
            run.ranks,
            run.git,
            " ".join(run.overrides),
        ]
        for run in runs
    ]
    return header, body


def _shown(run: LedgerRun) -> tuple[str, str | None]:
    """A metric and its value; where a run monitored none, as an evaluation, the first that it measured."""
    metric, value = run.metric, run.value
    if not metric:
        metric, value = next(iter(read_outcome(run.folder).get("metrics", {}).items()), ("", None))
    return metric, None if value is None else f"{value:.6g}"


def compare(runs: Sequence[LedgerRun]) -> Table:
    """What differs between runs: config values, then metrics; one column a run.

    Raises:
        UserError: there is only one run.
    """
    if len(runs) < 2:
        raise UserError(f"{runs[0].name} is one run, and two or more can be compared: type another")
    configs = [_flat(_yaml(run.folder / CONFIG) or {}) for run in runs]
    outcomes = [read_outcome(run.folder).get("metrics", {}) for run in runs]
    body: list[list[Any]] = []
    for key in sorted({key for config in configs for key in config if not key.startswith(("paths.", "sweep."))}):
        values = [config.get(key) for config in configs]
        # Paths of checkpoints and logs differ in every run.
        inside = all(str(run.folder.resolve()) in str(v) for run, v in zip(runs, values, strict=True))
        if len({str(value) for value in values}) > 1 and not inside:
            body.append([key, *values])
    for name in sorted({name for outcome in outcomes for name in outcome}):
        values = [outcome.get(name) for outcome in outcomes]
        body.append([name, *(None if value is None else f"{value:.6g}" for value in values)])
    return ["", *(run.name for run in runs)], body


def short_names(runs: Sequence[LedgerRun]) -> tuple[Path, list[str]]:
    """The folder in which all runs lie, and their names in it, which say where they differ."""
    folders = [run.folder.resolve() for run in runs]
    parent = Path(os.path.commonpath([folder.parent for folder in folders]))
    return parent, [str(folder.relative_to(parent)) for folder in folders]


def rendered(header: Sequence[str], body: Sequence[Sequence[Any]], form: str) -> str:
    """The table as text: ``table``, ``markdown`` or ``csv``.

    A terminal's width is kept to; where none shows the table, it is as wide as it needs.
    """
    if form == "csv":
        return as_csv(header, body)
    cells = [["" if cell is None else str(cell) for cell in line] for line in body]
    if form == "markdown":
        lines = [list(header), ["---"] * len(header), *cells]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    from rich.console import Console

    cells = _with_short_states(header, cells)
    console = Console()
    if not console.is_terminal:
        return _drawn(header, cells, [max(map(len, column)) for column in zip(header, *cells, strict=True)])
    return (_kept_to_width if header[-1] == "overrides" else _in_blocks)(header, cells, console.width)


def _kept_to_width(header: Sequence[str], cells: list[list[str]], width: int) -> str:
    """One row a run: names of runs and each override stay whole, the rest breaks where there is no room."""
    least: list[int] = []  # widths, without frame
    for place, title in enumerate(header):
        column = [title, *(line[place] for line in cells)]
        if title == "state":
            least.append(min(STATE_WIDTH, max(map(len, column))))
        elif title == "overrides":  # each stays whole, to be copied: lines break between two of them
            least.append(max(len(word) for text in column for word in text.split()))
        else:
            least.append(max(map(len, column)) if place == 0 or width >= ROOMY else LEAST_WIDTH - FRAME)
    taken = sum(least) + FRAME * len(least) + 1
    least[-1] += max(0, width - taken)
    fixed = [columns if title in LONG else None for title, columns in zip(header, least, strict=True)]
    return _drawn(header, cells, fixed, max(width, taken), whole=header if width >= ROOMY else header[:1])


def _in_blocks(header: Sequence[str], cells: list[list[str]], width: int) -> str:
    """One column a run, in as many tables below each other as it takes; each begins with the names of its lines."""
    header = [title.replace("/", "/\n").replace(",", ",\n") for title in header]  # lines break there
    columns = zip(header, *cells, strict=True)
    natural = [max(len(line) for text in column for line in text.split("\n")) for column in columns]
    widths = [natural[0], *(min(BLOCK_WIDTH, longest) for longest in natural[1:])]
    blocks: list[list[int]] = []
    taken = width
    for place in range(1, len(header)):
        if taken + widths[place] + FRAME > width:
            blocks.append([0])
            taken = widths[0] + FRAME + 1
        blocks[-1].append(place)
        taken += widths[place] + FRAME
    return "".join(
        _drawn([header[p] for p in block], [[line[p] for p in block] for line in cells], [widths[p] for p in block])
        for block in blocks
    )


def _drawn(
    header: Sequence[str],
    cells: list[list[str]],
    widths: Sequence[int | None],
    width: int | None = None,
    whole: Sequence[str] = (),
) -> str:
    """The table in ``width`` columns, or as many as ``widths`` add up to; ``whole`` columns of no width don't break."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.HEAVY_HEAD if shows("┏┃└") else box.ASCII)
    for title, columns in zip(header, widths, strict=True):
        no_wrap = columns is None and title in whole
        table.add_column(Text(title), overflow="fold", no_wrap=no_wrap, width=columns)
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    text = io.StringIO()
    Console(file=text, width=width or sum(columns + FRAME for columns in widths if columns) + 1).print(table)
    return text.getvalue()


def _with_short_states(header: Sequence[str], cells: list[list[str]]) -> list[list[str]]:
    """The cells with what failed runs said in about two lines."""
    if "state" not in header:
        return cells
    place, most = header.index("state"), 2 * STATE_WIDTH - LEAST_WIDTH
    short = [textwrap.shorten(line[place], most, placeholder=" ...") for line in cells]
    return [[*line[:place], text, *line[place + 1 :]] for line, text in zip(cells, short, strict=True)]


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix.removesuffix("."): node}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}{name}.").items()}


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
