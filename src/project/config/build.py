"""Objects from a config."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from project.errors import UserError, did_you_mean, full_tracebacks, nearest, sentence

Config = dict[str, Any]

# What Lightning's Trainer takes.
KINDS = {"model": "LightningModule", "data": "LightningDataModule"}
MOST_NAMES = 12  # of arguments, that are listed where a class takes more


def build(config: Config, key: str, **more: Any) -> Any:
    """Call the ``_target_`` of ``config[key]`` (``key`` may be dotted) with its other values and ``more``.

    Raises:
        UserError: the class can't be found, is none that the key asks for, or refuses its arguments.
    """
    node: Any = config
    for part in key.split("."):
        node = node[part]
    if key in KINDS and "_target_" in node:
        check_kind(key, node["_target_"])
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(node, _convert_="all", **more)
    except InstantiationException as error:
        # Hydra wraps what the class raised, once for each level; the reader wants the cause.
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if ours := sentence(cause):
            raise UserError(ours) from error
        if isinstance(cause, TypeError | ValueError | ImportError | InstantiationException):
            text = " ".join(str(cause).split())
            if isinstance(cause, TypeError) and (told := _wrong_argument(node, key, more, text)):
                raise UserError(told) from error
            where = "" if full_tracebacks() else " (HYDRA_FULL_ERROR=1 shows where)"
            raise UserError(f"{key}: {node.get('_target_')} can't be built: {text}{where}") from error
        raise cause from None


def check_kind(key: str, target: Any) -> None:
    """The class at ``model`` or ``data`` must be one that Lightning can train; what a function gives is not known.

    Raises:
        UserError: it is another.
    """
    found = locate(target, key)
    # By their names: a class that descends from neither need not make this process import Lightning.
    is_one = inspect.isclass(found) and any(
        base.__name__ == KINDS[key] and base.__module__.startswith("lightning.") for base in found.__mro__
    )
    if inspect.isclass(found) and not is_one:
        net = (
            f"; a net goes into a model: type model.net._target_={target}" if _is_net(found) and key == "model" else ""
        )
        raise UserError(
            f"{key}._target_={target} is no {KINDS[key]}: type a class that inherits from lightning.{KINDS[key]}{net}"
        )


def _is_net(found: type) -> bool:
    return any(f"{base.__module__}.{base.__name__}" == "torch.nn.modules.module.Module" for base in found.__mro__)


def _wrong_argument(node: Any, key: str, more: dict[str, Any], text: str) -> str | None:
    """What to type where a class of the node, or below it, lacks an argument or takes none of a name."""
    for place, child in _nodes(node, key):
        target = child["_target_"]
        try:
            found = locate(target, place)
            names, is_open = argument_names(found)
            parameters = inspect.signature(found).parameters
        except (UserError, TypeError, ValueError):  # a class in C may have no signature
            continue
        given = [name for name in child if not name.startswith("_")] + (list(more) if place == key else [])
        begin = f"{place}: {target} can't be built: "
        for name in given:
            if name not in names and (not is_open or f"unexpected keyword argument '{name}'" in text):
                return f"{begin}it takes no {name}{_instead(name, names, place, child)}"
        needed = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in given
        ]
        if needed and not {"_args_", "_partial_"} & child.keys():
            typed = " ".join(f"+{place}.{name}=VALUE" for name in needed)
            return f"{begin}it needs {' and '.join(needed)}: type {typed}"
    return None


def _nodes(node: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A node and those below it that name a class, the outermost first."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield key, node
        for name, child in node.items():
            yield from _nodes(child, f"{key}.{name}")


def _instead(name: str, names: list[str], place: str, node: dict[str, Any]) -> str:
    """The nearest argument that a class takes, or all of them."""
    if near := nearest(name, names):
        return f": did you mean {'' if near in node else '+'}{place}.{near}?"
    if not names:
        return f", nor any other argument: leave {place}.{name} out"
    rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f", but {', '.join(names[:MOST_NAMES])}{rest}: type one of these, or leave {place}.{name} out"


def build_all(config: Config, key: str) -> list[Any]:
    """The objects of a group of named nodes, in their order; empty where the group is ``none``."""
    return [build(config, f"{key}.{name}") for name, node in (config.get(key) or {}).items() if node]


def locate(target: Any, key: str) -> Any:
    """The class or function that a ``_target_`` names.

    Raises:
        UserError: there is no such module or name.
    """
    module_name, _, name = str(target).rpartition(".")
    if not module_name or not isinstance(target, str):
        raise UserError(f"{key}._target_={target} names no module: type the full path, as in my_module.MyClass")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        outer, _, class_name = module_name.rpartition(".")
        owner = getattr(sys.modules.get(outer), class_name, None)
        if inspect.isclass(owner) and hasattr(owner, name):
            return getattr(owner, name)  # a class method, as in my_module.MyModel.from_file
        raise UserError(
            f"{key}._target_={target} can't be imported, there is no module {error.name}: "
            "type a path that python can import from this folder, or install its package"
        ) from error
    if not hasattr(module, name):
        hint = did_you_mean(name, vars(module))
        raise UserError(f"{key}._target_={target} can't be found, {module_name} has no {name}{hint}")
    return getattr(module, name)


def accepted_arguments(target: Any) -> set[str] | None:
    """Names of the arguments that a class or function takes; None where it takes any (``**kwargs``)."""
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def argument_names(target: Any) -> tuple[list[str], bool]:
    """Names of the arguments that a class or function takes, and whether it may take others, by ``**kwargs``."""
    parameters = inspect.signature(target).parameters.values()
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    # **kwargs mostly go on to a class below it.
    for base in target.__mro__[1:-1] if is_open and inspect.isclass(target) else ():
        of_base = inspect.signature(vars(base).get("__init__", object)).parameters.values()
        names += [p.name for p in of_base if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return list(dict.fromkeys(names)), is_open
