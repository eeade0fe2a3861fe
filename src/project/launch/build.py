"""Objects from a config."""

import importlib
import inspect
import sys
from typing import Any

from project.errors import UserError, did_you_mean, full_tracebacks, sentence

Config = dict[str, Any]


def build(config: Config, key: str, **more: Any) -> Any:
    """Call the ``_target_`` of ``config[key]`` (``key`` may be dotted) with its other values and ``more``.

    Raises:
        UserError: the class can't be found, or refuses its arguments.
    """
    node = config
    for part in key.split("."):
        node = node[part]
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
            where = "" if full_tracebacks() else " (HYDRA_FULL_ERROR=1 shows where)"
            raise UserError(f"{key}: {node.get('_target_')} can't be built: {text}{where}") from error
        raise cause from None


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
