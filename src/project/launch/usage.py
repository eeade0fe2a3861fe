"""What ``--help`` shows of a command: three examples, the config groups with a line for each choice, and the config."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from project.config.composition import config_folder, explain
from project.config.from_checkpoint import FROM_RUN, typed_overrides
from project.examples import split_doc

OWN_FLAGS = {"-h", "--help", "-m", "--multirun"}
OF_HYDRA = {"hydra/launcher": {"basic": "One job after another on this machine: the default"}}  # no file of ours
FLAGS = """\
-m, --multirun       several jobs: every combination of the values, as in optimizer.lr=0.1,0.01
-c job, --cfg job    show the composed config and run nothing
--hydra-help         all flags of Hydra, which reads this command line"""


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether ``--help`` was typed, and no flag of Hydra's beside it that only Hydra's own help can heed."""
    flags = {argument for argument in arguments[1:] if argument.startswith("-")}
    return bool(flags & {"-h", "--help"}) and flags <= OWN_FLAGS


def help_text(doc: str | None, config_name: str, arguments: Sequence[str]) -> str:
    """The help of a command that reads ``conf/<config_name>.yaml``, with what else was typed."""
    config, wrong = _composed(config_name, [argument for argument in arguments[1:] if not argument.startswith("-")])
    chosen = dict(config.hydra.runtime.choices) | _several(arguments)
    del config.hydra
    examples, text = split_doc(doc)
    return "\n\n".join(
        (
            examples,
            text,
            "Choices of the config, to be typed as GROUP=CHOICE:",
            *(_group(group, chosen.get(group)) for group in groups() if _is_of(group, chosen, config)),
            "Values of the config, to be typed as KEY=VALUE:",
            OmegaConf.to_yaml(config).rstrip(),
            FLAGS,
            *([f"Shown without what was typed, which can't be: {wrong}"] if wrong else []),
        )
    )


def _composed(config_name: str, overrides: list[str]) -> tuple[DictConfig, str | None]:
    """The config with what was typed; where that can't be, without it, and why."""
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        # Of several values there is no one config.
        single = [text for text, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return compose(config_name, single, return_hydra_config=True), None
    except HydraException as error:
        wrong = explain(error, config_name, overrides)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose(config_name, return_hydra_config=True), wrong


def _several(arguments: Sequence[str]) -> dict[str, str]:
    """Groups of which several choices are typed, ``logger=[csv,tensorboard]``: Hydra keeps no record of them."""
    typed = {group: override.value() for group, (_, override) in typed_overrides(list(arguments)).items()}
    return {group: ", ".join(map(str, names)) for group, names in typed.items() if isinstance(names, list)}


def groups() -> Iterator[str]:
    """The folders below ``conf`` that hold configs, as ``model/net``."""
    folder = config_folder()
    yield from sorted({str(path.parent.relative_to(folder)) for path in folder.glob("*/**/*.yaml")})


def description(path: Path) -> str:
    """The first sentence of the comment that a config file begins with; empty where it has none."""
    words = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            words.append(line.lstrip("# "))
    sentence = re.match(r".*?\.(?=\s|$)", " ".join(words))
    return (sentence.group() if sentence else " ".join(words)).rstrip(".")


def _is_of(group: str, chosen: dict[str, str], config: DictConfig) -> bool:
    """Whether a command that composes ``config`` uses a group; those of a checkpoint's config can be typed too."""
    tops = {name.partition("/")[0] for name in chosen}
    if "ckpt_path" in list(config):  # which the config itself denies while the path is missing
        tops |= set(FROM_RUN)
    return group.partition("/")[0] in tops


def _group(group: str, chosen: str | None) -> str:
    """A group with a line for each choice, as wide as the terminal."""
    files = sorted((config_folder() / group).glob("*.yaml"))
    choices = {path.stem: description(path) for path in files} | OF_HYDRA.get(group, {})
    margin = max(map(len, choices)) + 4
    width = max(60, min(120, shutil.get_terminal_size().columns))
    lines = [f"{group} (now {chosen})" if chosen else group]
    for choice, text in sorted(choices.items()):
        name = f"  {choice}".ljust(margin)
        lines.append(textwrap.fill(text, width, initial_indent=name, subsequent_indent=" " * margin))
    return "\n".join(lines)
