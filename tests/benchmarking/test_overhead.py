"""What the parts of the overhead benchmark compare, without measuring it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from project.benchmarking import overhead
from project.benchmarking.compare import Comparison
from project.benchmarking.measure import Measured
from project.config.composition import config_folder, register_resolvers
from project.config.preflight import BENCHMARK_PARTS
from project.launch.run import Run


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("benchmark", ["benchmark=overhead", "paths.run_dir=somewhere"])
    plain: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    return plain


def groups(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *parts: str) -> list[list[Comparison]]:
    """What would be measured; nets keep their width, which is looked for once in each folder."""
    taken: list[list[Comparison]] = []
    calibrations: list[Path] = []

    def keep_width(plain: dict[str, Any], length_ms: float, devices: int, folder: Path, *_: Any) -> dict[str, Any]:
        assert folder not in calibrations
        calibrations.append(folder)
        return plain

    monkeypatch.setattr(overhead, "wide_enough", keep_width)
    monkeypatch.setattr(overhead, "compare", lambda found, *_: taken.extend(found) or [])
    arguments = {name: value for name, value in config["benchmark"].items() if name not in ("_target_", "parts")}
    overhead.compare_overhead(config, Run(Path("somewhere"), [], {}, 0.0), lambda _: None, list(parts), **arguments)
    return taken


@pytest.mark.parametrize(
    ("part", "references"),
    [
        ("tiny", ["hand-written", "bare Lightning", "popular pattern", "hand-written"]),
        ("steps", ["hand-written, steps of 5 ms", "hand-written, steps of 20 ms"]),
        ("ranks", ["hand-written, 2 ranks"]),
        ("tracking", ["no tracking, 1 rank", "no tracking, 2 ranks", "no tracking, 4 ranks"]),
        ("validation", ["inference loop"]),
        ("epoch", ["popular pipeline"]),
        ("start", ["Lightning's launcher, 4 ranks"]),
        ("config", ["import torch"]),
    ],
)
def test_part_has_its_rows(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, part: str, references: list[str]
) -> None:
    rows = [comparison for group in groups(config, monkeypatch, part) for comparison in group]
    assert len(rows) == len(references)
    for row, reference in zip(rows, references, strict=True):
        assert row.reference.name.startswith(reference)


def test_every_part_that_preflight_lets_through_is_one(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert config["benchmark"]["parts"] == list(BENCHMARK_PARTS)
    assert len(groups(config, monkeypatch, *BENCHMARK_PARTS)) == 11


def test_both_sides_of_tracking_are_turns_of_one_process(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps of two seconds with the tracker, of one without; turns of ten.
    lengths_s = [2.0 if step // 10 % 2 == 0 else 1.0 for step in range(2000)]
    report = {"ends_s": list(itertools.accumulate(lengths_s)), "epochs": [0] * 2000}
    for (row,) in groups(config, monkeypatch, "tracking"):
        on, off = row.candidate, row.reference
        assert on.task is not None
        assert on.task.measure == "tracking"
        assert (on.task, on.arguments, on.process) == (off.task, off.arguments, off.process)
        assert [side.seconds(Measured(0, 0, report)) for side in (on, off)] == [2, 1]
