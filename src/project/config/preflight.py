"""Refuse in seconds, before any rank starts, what can't work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from project.compression import KINDS
from project.config.build import accepted_arguments, check_kind, locate
from project.config.composition import config_folder, experiment_file
from project.errors import UserError, nearest
from project.strategies.pipeline_layout import PipelineLayout

Config = dict[str, Any]


def _whole(low: int, *also: Any) -> Callable[[Any], bool]:
    return lambda v: not isinstance(v, bool) and (v in also or (isinstance(v, int) and v >= low))


def _positive(*also: Any) -> Callable[[Any], bool]:
    return lambda v: not isinstance(v, bool) and (v in also or (isinstance(v, int | float) and v > 0))


def _share(v: Any) -> bool:
    """Lightning's limits: a number of batches, or a share of all as a float."""
    if v is None:
        return True
    if isinstance(v, bool) or not isinstance(v, int | float):
        return False
    return v >= 0 and (isinstance(v, int) or v <= 1.0)


def _flag(v: Any) -> bool:
    return isinstance(v, bool)


def _some_of(*names: str) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and bool(v) and set(v) <= set(names)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and bool(v) and all(map(test, v))


def _one_or_some(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: all(map(test, v)) and bool(v) if isinstance(v, list) else test(v)


def _names(v: Any) -> bool:
    return isinstance(v, list) and all(isinstance(name, str) for name in v)


BENCHMARK_PARTS = ("tiny", "steps", "ranks", "tracking", "validation", "epoch", "start", "config")  # of overhead.yaml
_LIMIT = "a whole number of batches, a share from 0.0 to 1.0, or null"
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("seed", lambda v: v is None or (_whole(0)(v) and v < 2**32), "a whole number from 0 to 4294967295, or null"),
    ("mode", lambda v: v in ("min", "max"), "min or max"),
    ("monitor", lambda v: v is None or isinstance(v, str), "the name of a logged metric, or null"),
    ("test", _flag, "true or false"),
    ("format", lambda v: v in ("csv", "parquet"), "csv or parquet"),
    ("quantize", lambda v: v is None or v in KINDS, f"{' or '.join(KINDS)}, or null"),
    ("callbacks.quantize.kind", lambda v: v in KINDS, " or ".join(KINDS)),
    ("callbacks.pruning.amount", lambda v: _positive()(v) and v < 1, "a share between 0 and 1, as 0.5"),
    ("callbacks.pruning.begin", lambda v: _positive(0)(v) and v <= 1, "a share from 0 to 1"),
    ("callbacks.pruning.end", lambda v: _positive()(v) and v <= 1, "a share above 0, up to 1"),
    ("callbacks.pruning.rounds", _whole(1), "a whole number from 1"),
    (
        "callbacks.last.min_gap_s",
        lambda v: _positive(None, 0)(v) and v != math.inf,
        "a number of seconds from 0, or null",
    ),
    ("model.channels_last", _flag, "true or false"),
    ("data.batch_size", _whole(1), "a whole number from 1"),
    ("data.num_workers", _whole(0), "a whole number from 0"),
    ("optimizer.lr", _positive(0), "a number from 0"),
    ("launch.threads_per_rank", _whole(1, "auto"), "a whole number from 1, or auto"),
    ("launch.keep_freed_memory", _flag, "true or false"),
    ("launch.timeout_s", _positive(), "a number of seconds above 0"),
    ("launch.host_timeout_s", _positive(), "a number of seconds above 0"),
    ("launch.hang_timeout_s", _positive(None), "a number of seconds above 0, or null"),
    ("launch.grace_s", _positive(), "a number of seconds above 0"),
    ("launch.max_restarts", _whole(0), "a whole number from 0"),
    ("launch.trusted_targets", _names, "a list of packages, or of names in them"),
    ("trainer.num_nodes", _whole(1), "a whole number from 1"),
    ("trainer.max_epochs", _whole(1, None, -1), "a whole number from 1, -1 for no limit, or null"),
    ("trainer.max_steps", _whole(1, -1), "a whole number from 1, or -1 for no limit"),
    ("trainer.accumulate_grad_batches", _whole(1), "a whole number from 1"),
    ("trainer.gradient_clip_val", _positive(None, 0), "a number from 0, or null"),
    ("trainer.gradient_clip_algorithm", lambda v: v in ("norm", "value"), "norm or value"),
    ("trainer.check_val_every_n_epoch", _whole(1, None), "a whole number from 1, or null"),
    ("trainer.val_check_interval", lambda v: v is None or isinstance(v, str) or (_share(v) and v > 0), _LIMIT),
    ("trainer.limit_train_batches", _share, _LIMIT),
    ("trainer.limit_val_batches", _share, _LIMIT),
    ("trainer.limit_test_batches", _share, _LIMIT),
    ("trainer.limit_predict_batches", _share, _LIMIT),
    ("trainer.num_sanity_val_steps", _whole(0, -1), "a whole number from 0, or -1 for all"),
    ("trainer.log_every_n_steps", _whole(1), "a whole number from 1"),
    ("benchmark.strategies", _list_of(lambda v: isinstance(v, str)), "a list of names, as [ddp,dp]"),
    ("benchmark.parts", _some_of(*BENCHMARK_PARTS), f"a list of {', '.join(BENCHMARK_PARTS)}"),
    ("benchmark.devices", _one_or_some(_whole(1)), "a whole number from 1, or a list of such"),
    ("benchmark.kinds", _some_of("strong", "weak"), "a list of strong and weak"),
    ("benchmark.batch_sizes", lambda v: v == [] or _list_of(_whole(1))(v), "a list of whole numbers from 1, or []"),
    ("benchmark.step_ms", lambda v: v is None or _one_or_some(_positive())(v), "a number of milliseconds above 0"),
    *(
        (f"benchmark.{name}", _whole(1), "a whole number from 1")
        for name in ("repeats", "warmup_steps", "epochs", "calls")
    ),
    ("benchmark.steps", _whole(2), "a whole number from 2"),
    ("benchmark.start_devices", _whole(2), "a whole number from 2"),
    ("benchmark.measured_s", _positive(), "a number of seconds above 0"),
    ("benchmark.tracking_s", _positive(), "a number of seconds above 0"),
    ("benchmark.timeout_s", _positive(), "a number of seconds above 0"),
    ("benchmark.budget_s", _positive(), "a number of seconds above 0"),
    ("benchmark.min_gain", _positive(0), "a share from 0, as 0.03"),
    ("benchmark.allow_inexact", _flag, "true or false"),
)
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
PRECISIONS = (
    "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", "transformer-engine",
    "transformer-engine-float16", "32", "16", "64", "bf16",
)  # fmt: skip


# Nodes whose values are the arguments of one class.
GROUPS_OF_CLASSES = ("data", "model", "model.net", "optimizer", "scheduler")

# How Lightning steps a schedule; its class knows nothing of them.
OF_SCHEDULE = ("interval", "frequency", "monitor", "strict", "name")

# Packages that classes of this one need, and that only an extra installs.
NEEDS = {
    "project.tracking.wandb.WandbRun": "wandb",
    "project.tracking.mlflow.on_rank_zero": "mlflow",
    "project.compression.quantization.Quantization": "torchao",
}

# What every command reads of the config; `~trainer.devices` would take it out.
REQUIRED = (
    "name", "seed", "data._target_", "model._target_", "paths.run_dir", "launch.threads_per_rank", "launch.timeout_s",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy",
)  # fmt: skip


def check_complete(config: Config) -> None:
    """Check that nothing was taken out of the config that no run can do without.

    Raises:
        UserError: something was.
    """
    for key in REQUIRED:
        if _select(config, key) is _ABSENT:
            raise UserError(f"{key} is not in the config, and no run can do without it: give it a value, {key}=VALUE")


def check(config: Config) -> None:
    """Check the values, names and packages of a config.

    Raises:
        UserError: a value can't be, a name is unknown, or a package is not installed.
    """
    for key, test, allowed in RULES:
        value = _select(config, key)
        if value is not _ABSENT and not test(value):
            raise UserError(f"{key}={value} can't be: type {key}= with {allowed}")
    if "split" in config:
        _one_of("split", config["split"], ("train", "val", "test") if "format" in config else ("val", "test"))
    trainer = config["trainer"]
    _one_of("trainer.accelerator", trainer["accelerator"], ACCELERATORS)
    _one_of("trainer.precision", str(trainer.get("precision", "32-true")), PRECISIONS)
    if "test" in config:  # evaluation has the model of its checkpoint
        _check_classes(config)
    no_end = trainer.get("max_epochs") == -1 and trainer.get("max_steps", -1) == -1
    if no_end and not trainer.get("max_time") and "test" in config:
        raise UserError(
            "trainer.max_epochs=-1 never ends: type trainer.max_steps=N or trainer.max_time=DD:HH:MM:SS too"
        )
    weights = _select(config, "callbacks.finetuning.weights")
    begins = "test" in config and not config.get("resume")  # what goes on has weights of its own
    is_file = not isinstance(weights, str) or weights == "published" or Path(weights).expanduser().is_file()
    if begins and not is_file:
        raise UserError(
            f"callbacks.finetuning.weights={weights} is no file: type callbacks.finetuning.weights=published, or a "
            "checkpoint's path"
        )
    for key, target in targets(config):
        check_installed(key, target)
        if target in NEEDS:
            check_installed(key, target, NEEDS[target])


def _check_classes(config: Config) -> None:
    """A model must have an output for each class of the data, where the data's config says how many there are."""
    classes = _select(config, "data.num_classes")
    for key in ("model.num_classes", "model.net.num_classes"):
        outputs = _select(config, key)
        if type(classes) is int and type(outputs) is int and outputs < classes:
            raise UserError(
                f"the data has {classes} classes, and {key}={outputs}: type {key}={classes} or leave it out"
            )


def check_batch_size(config: Config, world_size: int, pipeline: PipelineLayout | None = None) -> None:
    """The global batch size must be shared out equally, or ranks would weigh their samples differently.

    So must the share of a ``pipeline`` to its micro-batches, where several ranks form one.

    That ``data.batch_size`` is global holds for this package's data modules; other classes have rules of their own.
    """
    batch_size = _select(config, "data.batch_size")
    if not config["data"]["_target_"].startswith(__name__.partition(".")[0] + "."):
        return
    if isinstance(batch_size, int) and batch_size % world_size:
        below, above = batch_size // world_size * world_size, -(-batch_size // world_size) * world_size
        choices = " or ".join(f"data.batch_size={size}" for size in (below, above) if size)
        raise UserError(
            f"data.batch_size={batch_size} is the global batch size and {world_size} ranks can't share it equally: "
            f"type {choices}"
        )
    share = batch_size // world_size if isinstance(batch_size, int) else 0
    if pipeline is not None and pipeline.ranks > 1 and share and pipeline.cut(share) is None:
        unit = world_size * pipeline.unit()
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        choices = " or ".join(f"data.batch_size={size}" for size in (below, above) if size)
        parts = f"{pipeline.micro_batches} " if pipeline.micro_batches else f"at least {pipeline.stages} "
        raise UserError(
            f"data.batch_size={batch_size} leaves a pipeline {share} samples, which can't be cut into {parts}equal "
            f"micro-batches: type {choices}, or trainer.strategy.schedule=gpipe trainer.strategy.micro_batches=auto"
        )


def fit_to_targets(config: Config, overrides: list[str]) -> list[str]:
    """Make ``model._target_=mine.Model`` work: leave out what the class that was put in does not take.

    The group's other values belong to the class that it named before. Those that were typed stay, so that a
    mistyped one is still an error. Returns what was left out, as dotted keys.
    """
    typed = {text.lstrip("+").partition("=")[0].replace("/", ".") for text in overrides}
    typed |= _targets_of_experiment(overrides)
    left_out: list[str] = []
    for key in GROUPS_OF_CLASSES:
        node = _select(config, key)
        if f"{key}._target_" not in typed or not isinstance(node, dict):
            continue
        if key in ("model", "data"):
            check_kind(key, node["_target_"])
        accepted = accepted_arguments(locate(node["_target_"], key))
        for name in list(node):
            kept = name.startswith("_") or accepted is None or name in accepted
            kept = kept or (key == "scheduler" and name in OF_SCHEDULE)
            if not kept and not any(t == f"{key}.{name}" or t.startswith(f"{key}.{name}.") for t in typed):
                del node[name]
                left_out.append(f"{key}.{name}")
        if key in ("optimizer", "scheduler") and isinstance(_select(config, f"model.{key}"), dict):
            config["model"][key] = dict(node)  # which the model's config refers to
    for group in ("optimizer", "scheduler"):
        if f"model.{group}" in left_out:
            _drop_unused(config, group, typed)
    return left_out


def replaced_defaults(config: Config, overrides: list[str]) -> dict[str, str]:
    """Values of the config that win, untyped, over a default which the class that was put in has of its own.

    Each as ``key=value``, with what is to be typed for the class's.
    """
    typed = {text.lstrip("+").partition("=")[0].replace("/", ".") for text in overrides}
    replaced: dict[str, str] = {}
    for key in GROUPS_OF_CLASSES:
        node = _select(config, key)
        if f"{key}._target_" not in typed or not isinstance(node, dict):
            continue
        parameters = inspect.signature(locate(node["_target_"], key)).parameters
        for name, value in node.items():
            default = parameters[name].default if name in parameters else None
            default = list(default) if isinstance(default, tuple) else default
            told = name != "seed" and f"{key}.{name}" not in typed  # the run's seed is everybody's
            if told and default not in (None, inspect.Parameter.empty, value):
                replaced[_override(f"{key}.{name}", value)] = _override(f"{key}.{name}", default)
    return replaced


def _override(key: str, value: Any) -> str:
    """``key=value`` as it is typed."""
    text = str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
    return f"{key}={text}"


def _targets_of_experiment(overrides: list[str]) -> set[str]:
    """Keys of the classes that a typed experiment puts in, as a sweep's ``best.yaml`` of own classes does."""
    names = [text.partition("=")[2] for text in overrides if text.startswith("experiment=")]
    name = experiment_file(names[-1]) if names else "none"
    path = Path(name) if Path(name).suffix else config_folder() / "experiment" / f"{name}.yaml"
    return {f"{key}._target_" for key, _ in targets(OmegaConf.to_container(OmegaConf.load(path)))}


def _drop_unused(config: Config, group: str, typed: set[str]) -> None:
    """Take out a group that the model which was put in does not read; what was typed for it would be ignored."""
    ignored = sorted(key for key in typed if key == group or key.startswith(f"{group}."))
    if ignored and config.get(group) is not None:  # scheduler=none asks for what it gets
        raise UserError(
            f"{ignored[0]} was typed, but model._target_={config['model']['_target_']} takes no {group}, so nothing "
            f"would come of it: leave it out, or give the class an argument {group}"
        )
    config.pop(group, None)


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every ``_target_`` of a config with the key it stands at."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield key, node["_target_"]
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from targets(child, f"{key}[{number}]")


def check_installed(key: str, target: str, package: str | None = None) -> None:
    """The package that a ``_target_`` lies in, or needs, must be there; where an extra brings it, name the extra."""
    package = package or target.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return
    extra = extra_of(package)
    elsewhere = f"type the command in the folder that holds {package}, or PYTHONPATH=FOLDER before it, or mend the name"
    advice = f'type pip install "project[{extra}]"' if extra else elsewhere
    raise UserError(f"{key}._target_={target} needs the package {package}, which is not installed: {advice}")


def extra_of(package: str) -> str | None:
    """The extra of this project that installs a package, from the project's own metadata."""
    from packaging.requirements import Requirement

    root = __name__.partition(".")[0]
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(root) or []]
    except importlib.metadata.PackageNotFoundError:
        return None
    extras: list[str] = [e for e in importlib.metadata.metadata(root).get_all("Provides-Extra") or [] if e != "dev"]
    for requirement in requirements:
        if requirement.marker and requirement.name.replace("-", "_").lower() == package.replace("-", "_").lower():
            extra = next((e for e in extras if requirement.marker.evaluate({"extra": e})), None)
            if extra:
                return extra
    return None


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        match = nearest(str(value), allowed)
        advice = f"{key}={match}" if match else f"one of {', '.join(allowed)}"
        raise UserError(f"{key}={value} is not known ({', '.join(allowed)}): type {advice}")


_ABSENT = object()


def _select(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ABSENT
        node = node[part]
    return node
