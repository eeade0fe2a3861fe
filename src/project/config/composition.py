"""Where the configs lie, and what Hydra's errors about them mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from project.config.data_facts import fact
from project.errors import UserError, did_you_mean, nearest, sentence
from project.launch import devices
from project.launch.run_folder import new_folder
from project.without_examples import LEFT_OUT

# Keys that other commands read, and what to type instead.
OF_OTHERS = {
    "ckpt_path": (
        "type resume=FOLDER to go on with a run, or python -m project.evaluate ckpt_path=FILE to test its weights"
    ),
}


def config_folder() -> Path:
    """``conf`` of the repository or, in an installed wheel, the copy inside the package."""
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def register_resolvers() -> None:
    """Register what configs may call.

    ``${new_folder:parent,prefix}`` claims a folder; ``${slug:text}`` makes a text fit for a folder's name;
    ``${gpus:accelerator,devices}`` is the number of GPUs of this host that a job needs; ``${fact:name}`` is what the
    data say of themselves.
    """
    OmegaConf.register_new_resolver("new_folder", new_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("gpus", devices.count_gpus, replace=True)
    OmegaConf.register_new_resolver("slug", slug, replace=True)
    OmegaConf.register_new_resolver("fact", fact, replace=True)


def take_experiment_file(arguments: list[str]) -> None:
    """Let ``experiment=PATH.yaml`` name a file outside of ``conf/experiment``, such as a sweep's ``best.yaml``.

    It is registered for Hydra under its own name, which takes the path's place in ``arguments``; ``experiment_file``
    finds the path again.

    Raises:
        UserError: there is no such file, or it is no YAML.
    """
    for place, argument in enumerate(arguments):
        key, _, text = argument.partition("=")
        if key != "experiment" or not text.endswith((".yaml", ".yml")):
            continue
        path = Path(text)
        try:
            node = OmegaConf.load(path)
        except (OSError, YAMLError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise UserError(f"experiment={text} can't be read ({reason}): type the path of a YAML file") from error
        name = path.stem
        while (config_folder() / "experiment" / f"{name}.yaml").exists():
            name += "_file"
        ConfigStore.instance().store(
            group="experiment", name=name, node=node, package="_global_", provider=str(path.resolve())
        )
        arguments[place] = f"experiment={name}"


def name_after_own_class(arguments: list[str]) -> None:
    """Name a run after the class that is put in, ``my_models.MyNet`` as ``my_net``, unless a name was typed.

    The experiment's name belongs to the model and the data that are replaced; so one that is typed stands.
    """
    typed = dict(argument.partition("=")[::2] for argument in arguments[1:])
    if typed.keys() & {"name", "resume"} or typed.get("experiment", "none") != "none":
        return
    key = next((key for key in ("model._target_", "data._target_") if key in typed), None)
    target = typed[key].strip("'\"") if key else ""
    if re.fullmatch(r"(\w+\.)+\w+", target):  # not several, of a sweep
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target.rpartition(".")[2])
        # Beside it: behind a flag Hydra would not know it.
        arguments.insert(arguments.index(f"{key}={typed[key or '']}"), f"name={words.lower()}")


def check_folders(arguments: Sequence[str], keys: Sequence[str] = ("hydra.run.dir",)) -> None:
    """Check that nobody names a run's folder by settings of Hydra's that decide nothing here.

    Raises:
        UserError: somebody does.
    """
    for argument in arguments:
        key, _, folder = argument.lstrip("+").partition("=")
        if key in keys:
            raise UserError(
                f"{argument} has no effect on a run, whose folder the config names: type paths.run_dir={folder}, or "
                f"paths.outputs={folder} for the folder that holds all runs"
            )


def check_job_folders(arguments: Sequence[str]) -> None:
    """Check that nobody names the folders of a sweep's jobs, which are told apart by what varies.

    Raises:
        UserError: somebody does.
    """
    for argument in arguments:
        if argument.lstrip("+").startswith("hydra.sweep.subdir="):
            raise UserError(
                f"{argument} has no effect on a sweep, whose jobs have folders named after what varies: leave it out, "
                "or type hydra.sweep.dir=FOLDER for the folder that holds them all"
            )


def check_choices(arguments: list[str]) -> None:
    """Check that each config group that is typed gets the name of a file, which Hydra takes for granted.

    Raises:
        UserError: it gets a number, nothing, or a list with a name that is none.
    """
    for argument in arguments[1:]:
        group = argument.lstrip("+").partition("=")[0]
        if "=" not in argument or not re.fullmatch(r"\w[\w/]*", group) or not (config_folder() / group).is_dir():
            continue
        override = OverridesParser.create().parse_override(argument)
        if override.is_sweep_override():
            continue
        choices = sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))
        value = override.value()
        # Of a single name that is none, Hydra tells.
        if all(v in choices for v in value) if isinstance(value, list) else isinstance(value, str):
            continue
        advice = "none" if "none" in choices else choices[0] if choices else "NAME"
        raise UserError(f"{argument} names no choice, there are {', '.join(choices)}: type {group}={advice}")


def experiment_file(name: str) -> str:
    """The path that the experiment ``name`` was read from, if that lies outside of ``conf``; else the name."""
    node = ConfigStore.instance().repo.get("experiment", {}).get(f"{name}.yaml")
    return node.provider if node is not None else name


def slug(text: str) -> str:
    """Keep letters, digits and ``=,.+-``; everything else becomes ``-``. At most 120 characters."""
    return re.sub(r"[^\w=,.+-]+", "-", str(text)).strip("-")[:120]


def explain(error: Exception, config_name: str, arguments: Sequence[str] = ()) -> str | None:
    """Hydra's or OmegaConf's error in a sentence with the nearest right name; None for any other error.

    ``arguments`` were typed: keys are looked for in the groups that they choose.
    """
    if isinstance(error, MissingConfigException):
        return _explain_choice(error)
    if isinstance(error, OverrideParseException):
        return (
            f"the override {error.override} can't be read: type key=value, or quote it as in 'key=\"a b\"' "
            f"({' '.join(str(error).split())})"
        )
    if isinstance(error, ConfigCompositionException):
        return _explain_override(f"{error}\n{error.__cause__ or ''}", config_name, arguments)
    if isinstance(error, MissingMandatoryValue):
        return f"{_full_key(error)} has no value: type {_full_key(error)}=VALUE"
    if isinstance(error, InterpolationKeyError):
        match = re.search(r"Interpolation key '([^']+)'", str(error))
        if match:
            read = match.group(1)
            has_none = (config_folder() / read / "none.yaml").exists()
            advice = f"type {read}=none" if has_none else f"type +{read}=VALUE, or {_full_key(error)}=VALUE"
            return f"{_full_key(error)} reads {read}, which is not in the config: {advice}"
    if isinstance(error, OmegaConfBaseException):
        return _told_by_resolver(error) or " ".join(str(error).split())
    return str(error) if isinstance(error, HydraException) else None


def _told_by_resolver(error: BaseException) -> str | None:
    """The sentence of an error that a resolver raised, which OmegaConf wraps in its own."""
    cause: BaseException | None = error
    while cause is not None:
        if text := sentence(cause):
            return text
        cause = cause.__context__
    return None


def _full_key(error: OmegaConfBaseException) -> str:
    match = re.search(r"full_key: (\S+)", str(error))
    return match.group(1) if match else str(error.full_key or "a mandatory key")


def _explain_choice(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, choice = missing.rpartition("/")
    if not group or error.options is None:
        return " ".join(str(error).split())
    match = nearest(choice, error.options)
    advice = f"type {group}={match}" if match else f"type {group}= with one of these"
    if missing in _left_out():
        why = "an example of the template, which this project was made without (rename --without-examples)"
        copy = f"type one of these, or copy conf/{missing}.yaml and what it needs from there"
        return f"{group}={choice} is {why}; the choices are {', '.join(error.options)}: {copy}"
    return f"{group}={choice} can't be chosen, the choices are {', '.join(error.options)}: {advice}"


def _left_out() -> list[str]:
    path = Path(__file__).parents[1] / LEFT_OUT
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _explain_override(message: str, config_name: str, arguments: Sequence[str]) -> str:
    from project.config import unknown_keys

    keys = list(walk(_with_choices(config_name, arguments)))
    several = re.match(r"Multiple values for (\S+)\. To override a value use 'override \S+ (\S+)'", message)
    if several:
        group, choice = several.groups()
        return f"{group} has a choice already, and + adds one to a group that has none: type {group}={choice}"
    ambiguous = re.match(r"Ambiguous value for argument '([^\n]+)'\n", message)
    if ambiguous:
        return _explain_several(*ambiguous.group(1).split("=", 1))
    twice = re.match(r"(\S+) appears more than once in the final defaults list", message)
    if twice:
        return f"{twice.group(1)} has a choice already: type {twice.group(1)}=CHOICE once, without a +"
    present = re.search(r"An item is already at '([^']+)'", message)
    if present:
        return unknown_keys.in_config_already(present.group(1), arguments)
    deleted = re.search(r"Could not delete from config\. '([^']+)' does not exist", message)
    if deleted:
        key = deleted.group(1)
        return f"{key} is not in the config{key_hint(key, keys) or '.'}"
    match = re.search(
        r"Could not (?:override|delete from config|append to config|append|add) '?([^'\n]+?)'?\.(?:\n| )", message
    )
    unknown = "not in struct" in message or "No match in the defaults list" in message or "does not exist" in message
    if match is None or not unknown:
        return " ".join(message.split())
    key = match.group(1).lstrip("+~").partition("=")[0]
    groups = list(_groups())
    if key in groups:
        return f"{key} is a config group that {config_name} does not use: type +{key}=CHOICE to add it"
    if key in OF_OTHERS:
        return f"{key} is not in the config: {OF_OTHERS[key]}"
    if "." in key:
        return f"{key} is not in the config{unknown_keys.advice(key, keys, config_name, arguments)}"
    # At the top of the config nothing would read it.
    return f"{key} is not in the config{key_hint(key, [*keys, *groups]) or f': {where_to_add(key)}'}"


def _explain_several(key: str, values: str) -> str:
    """The sentence for ``key=a,b`` of a single run."""
    begin = f"{key}={values} gives several values: type -m too, for a run with each"
    as_list = f"'{key}=[{values}]'"
    if key == "trainer.devices":
        return f"{begin}, or {as_list} for one run on these"
    return f"{begin}; for one value type {as_list}, a list, or '{key}=\"{values}\"', a text"


def where_to_add(key: str) -> str:
    """What to type for a new key that nothing reads at the top of the config."""
    return f"leave it out, or add it to the class that takes it, as in +model.{key}=VALUE"


def key_hint(key: str, known: list[str]) -> str:
    """``": did you mean X?"`` with the nearest of all keys: first by the whole path, then by the last part alone.

    A key of the same name elsewhere is meant rather than one that only looks like it.
    """
    last_part = key.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last_part]
    if "." in key and len(elsewhere) == 1:
        return f": did you mean {elsewhere[0]}?"
    # Below the same parent whole paths look alike, whatever their last parts: these must be so at least by half.
    alike = [name for name in known if nearest(last_part, [name.rpartition(".")[2]], cutoff=0.5)]
    hint = did_you_mean(key, alike)
    if not hint:
        by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
        last = nearest(last_part, by_last)
        hint = f": did you mean {by_last[last]}?" if last else ""
    return hint


def top_keys(config_name: str) -> set[str]:
    """Keys at the top of ``conf/<config_name>.yaml`` and of the configs in its defaults."""
    node = OmegaConf.load(config_folder() / f"{config_name}.yaml")
    assert isinstance(node, DictConfig)
    keys = {str(key) for key in node if key != "defaults"}
    for default in node.get("defaults", []):
        if default == "_self_":
            continue
        if isinstance(default, str) and "/" not in default:
            keys |= top_keys(default)
        else:
            groups = [default] if isinstance(default, str) else list(default)
            places = [str(group).split()[-1].lstrip("/") for group in groups]  # "override /a/b", "optional a@b.c"
            keys |= {re.split(r"[./]", place.partition("@")[2] or place)[0] for place in places}
    return keys


def _groups() -> Iterator[str]:
    folder = config_folder()
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            yield str(path.relative_to(folder))


def _with_choices(config_name: str, arguments: Sequence[str]) -> DictConfig:
    """The config with no overrides but the groups that are chosen in ``arguments``."""
    groups = set(_groups())
    chosen = [text for text in arguments if "=" in text and text.partition("=")[0] in groups]
    try:
        return composed_again(config_name, chosen)
    except HydraException:  # one of them is what is wrong
        return composed_again(config_name, [])


def composed_again(config_name: str, overrides: list[str]) -> DictConfig:
    """A config after the command's own could not be composed.

    Raises:
        HydraException: it can't be composed either.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()  # Hydra is about to exit; its state has served
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(config_name, overrides)


def walk(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """All keys of a config, dotted; interpolations are not followed."""
    for name in map(str, node):
        key = f"{prefix}{name}"
        yield key
        child: Any = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from walk(child, f"{key}.")
