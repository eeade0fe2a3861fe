"""What the template itself costs: the same training by hand, in bare Lightning, and in a popular pattern.

Each side of a row trains the same net on the same batches with the same optimizer; the last loss of the loop by hand is
the template's. What counts is the ratio within a repeat, because machines are shared. The images lie in memory, in the
shape and batch size of the experiment's data, so that no time goes into reading them. The loops by hand leave torch's
optimizer and number of threads as they are by default; the template fuses the one, takes fewer of the others for small
steps, and keeps freed memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from project.benchmarking import tracking_turns
from project.benchmarking.compare import Comparison, compare
from project.benchmarking.measure import (
    Contender,
    seconds_per_epoch,
    seconds_per_step,
    seconds_to_first_step,
    whole_seconds,
)
from project.benchmarking.report import Results, of_comparisons
from project.benchmarking.setup import (
    Config,
    hand_written,
    template,
    threads_per_rank,
    training_config,
    wide_enough,
    with_net,
)
from project.errors import UserError
from project.launch.run import Run

Group = list[Comparison]


def compare_overhead(
    config: Config,
    run: Run,
    tell: Callable[[str], None],
    parts: list[str],
    tiny_width: int,
    tiny_batch_size: int,
    step_ms: list[float],
    measured_s: float,
    tracking_s: float,
    epochs: int,
    start_devices: int,
    repeats: int,
    timeout_s: float,
) -> Results:
    """Every row of the overhead table.

    Args:
        config: The experiment; its net must be an MLP, whose width sets the length of a step.
        run: Its folder is for the measured runs.
        tell: Shows a line of progress.
        parts: Which rows: ``tiny``, ``steps``, ``ranks``, ``tracking``, ``validation``, ``epoch``, ``start`` and
            ``config``.
        tiny_width: Units of the two hidden layers of the smallest net.
        tiny_batch_size: Its batch size.
        step_ms: Lengths of the longer steps; ranks, tracking and validation take the last.
        measured_s: About how long steps are measured in each process.
        tracking_s: The same for tracking, on and off by turns.
        epochs: Measured epochs of the digits.
        start_devices: Ranks whose start is compared.
        repeats: Fresh processes for each side of each row.
        timeout_s: Of one process.
    """
    batch_size = config["data"]["batch_size"]

    @functools.cache
    def sized(length_ms: float, devices: int, measure_what: str = "train") -> tuple[Config, int]:
        """A training, or validation, whose steps take so long, and how many of them."""
        tell(f"looking for the width at which a step takes {length_ms} ms")
        steps = _steps(length_ms, measured_s)
        plain = training_config(config, batch_size, steps)
        calibration = run.folder / f"calibration_{measure_what}_{length_ms}_ms_{devices}"
        return wide_enough(plain, length_ms, devices, calibration, timeout_s, measure_what), steps

    groups: list[Group] = []
    if "tiny" in parts:
        steps = _steps(1, measured_s)
        groups.append(tiny_steps(with_net(training_config(config, tiny_batch_size, steps), width=tiny_width), steps))
    if "steps" in parts:
        groups += [long_steps(*sized(length_ms, 1), length_ms) for length_ms in step_ms]
    if "ranks" in parts:
        groups.append(two_ranks(*sized(step_ms[-1], 2), step_ms[-1]))
    if "tracking" in parts:
        steps = _steps(step_ms[-1], tracking_s)
        plain = training_config(config, batch_size, steps)
        for devices in (1, 2, 4):
            wide, _ = sized(step_ms[-1], devices)
            groups.append(tracking(plain | {"model": wide["model"]}, steps, step_ms[-1], devices))
    if "validation" in parts:
        wide, num_batches = sized(step_ms[-1], 1, "validate")
        short = training_config(config, batch_size, steps=1, val_batches=num_batches)
        groups.append(validation(short | {"model": wide["model"]}, num_batches, step_ms[-1]))
    if "epoch" in parts:
        groups.append(digits_epoch(config, epochs))
    if "start" in parts:
        groups.append(start(start_devices))
    if "config" in parts:
        groups.append(config_printing())
    return of_comparisons(compare(groups, repeats, run.folder / "runs", timeout_s, tell))


def _steps(length_ms: float, measured_s: float) -> int:
    """How many steps fill the time, the first fifth of them a warm-up."""
    return max(25, round(1.25 * 1000 * measured_s / length_ms))


def tiny_steps(config: Config, steps: int) -> Group:
    """Steps in which the net costs next to nothing: what remains is the loop around it."""
    warmup = steps // 5
    ours = template("template, tiny steps", config, steps, warmup)
    by_hand = hand_written("hand-written, tiny steps", config, steps, warmup)
    bare, popular = (
        Contender(
            f"{name}, tiny steps",
            ["-m", "project.benchmarking.lightning_only", pattern],
            seconds_per_step(warmup),
            by_hand.task,
            by_hand.threads,
        )
        for name, pattern in (("bare Lightning", "bare"), ("popular pattern", "popular"))
    )
    return [
        Comparison("tiny steps: hand-written", "step", ours, by_hand, 0.60),
        Comparison("tiny steps: bare Lightning", "step", ours, bare),
        Comparison("tiny steps: popular pattern", "step", ours, popular, 3.0),
        Comparison("tiny steps: bare Lightning by hand-written", "step", bare, by_hand),
    ]


def long_steps(config: Config, steps: int, length_ms: float) -> Group:
    """Steps of a length that is more usual."""
    what = f"steps of {length_ms:g} ms"
    ours = template(f"template, {what}", config, steps, steps // 5)
    by_hand = hand_written(f"hand-written, {what}", config, steps, steps // 5)
    return [Comparison(f"{what}: hand-written", "step", ours, by_hand, 0.99 if length_ms >= 20 else 0.95)]


def two_ranks(config: Config, steps: int, length_ms: float) -> Group:
    """DDP on two ranks, each with its share of the cores, against torch's DDP under torchrun."""
    what = f"2 ranks, steps of {length_ms:g} ms"
    ours = template(f"template, {what}", config, steps, steps // 5, strategy="ddp", devices=2)
    by_hand = hand_written(f"hand-written, {what}", config, steps, steps // 5, strategy="ddp", devices=2)
    return [Comparison(f"{what}: hand-written DDP", "step", ours, by_hand, 0.97)]


def tracking(config: Config, steps: int, length_ms: float, devices: int) -> Group:
    """The tracker that is on by default, against the same training without it, in turns of a few steps."""
    what = f"{devices} rank{'s' if devices > 1 else ''}, steps of {length_ms:g} ms"
    both = template(f"tracking, {what}", config, steps, 0, strategy="ddp" if devices > 1 else "auto", devices=devices)
    assert both.task is not None
    task = replace(both.task, measure="tracking")
    on, off = (
        replace(
            both, name=name, task=task, process=both.name, seconds=tracking_turns.seconds_per_step(tracked, steps // 5)
        )
        for name, tracked in ((both.name, True), (f"no {both.name}", False))
    )
    return [Comparison(f"tracking, {what}: without", "step", on, off, 0.99)]


def validation(config: Config, num_batches: int, length_ms: float) -> Group:
    """Validation with the default metrics, against loss and accuracy in an inference loop."""
    batch_size = config["data"]["batch_size"]
    sides: list[Contender] = []
    for side in (template("template, validation", config, 1, 0), hand_written("inference loop", config, 1, 0)):
        assert side.task is not None
        task = replace(side.task, measure="validate", steps=num_batches)
        sides.append(replace(side, task=task, seconds=seconds_per_step(num_batches // 5, batch_size)))
    what = f"validation, batches of {length_ms:g} ms: inference loop"
    return [Comparison(what, "sample", sides[0], sides[1], 1 / 1.05)]


def digits_epoch(config: Config, epochs: int) -> Group:
    """Whole epochs of the digits, validation and checkpoints included, against images that come one by one."""
    if config["data"]["_target_"] != "project.data.DigitsDataModule":
        raise UserError(f"data._target_={config['data']['_target_']}: the epoch is one of the digits: type data=digits")
    warmup = 2
    length = {"max_epochs": warmup + epochs, "max_steps": -1}
    config = {key: value for key, value in config.items() if key != "benchmark"}
    config |= {"test": False, "trainer": config["trainer"] | length}
    seconds = seconds_per_epoch(warmup)
    ours = replace(template("template, digits", config, -1, 0), seconds=seconds)
    popular = Contender(
        "popular pipeline, digits",
        ["-m", "project.benchmarking.lightning_only", "popular_pil"],
        seconds,
        ours.task,
        ours.threads,
    )
    return [Comparison("digits epoch: PIL images one by one", "epoch", ours, popular, 5.0)]


def start(devices: int) -> Group:
    """From the command to the end of the first step, against Lightning's own launcher for the same script."""
    overrides = [
        f"trainer.devices={devices}",
        "trainer.accelerator=cpu",
        "trainer.max_steps=1",
        "test=false",
        'paths.run_dir="{folder}"',
        "+callbacks.step_times._target_=project.benchmarking.step_times.StepTimes",
        '+callbacks.step_times.report="{report}"',
        "+callbacks.step_times.steps=1",
    ]
    ours, lightnings = (
        Contender(name, ["-m", module, *overrides], seconds_to_first_step, threads=threads_per_rank(devices))
        for name, module in (
            (f"project.train, {devices} ranks", "project.train"),
            (f"Lightning's launcher, {devices} ranks", "project.benchmarking.lightning_launcher"),
        )
    )
    return [Comparison(f"start to first step, {devices} ranks: Lightning's launcher", "start", ours, lightnings, 3.0)]


def config_printing() -> Group:
    """How soon the composed config is printed, against the time that importing torch alone takes."""
    ours = Contender("--cfg job", ["-m", "project.train", "--cfg", "job"], whole_seconds)
    torch = Contender("import torch", ["-c", "import torch"], whole_seconds)
    return [Comparison("--cfg job: import torch", "start", ours, torch, 1 / 0.6)]
