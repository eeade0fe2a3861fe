"""Which hyperparameters a run shows: few, plain, and of a constant type from run to run."""

from typing import Any

Plain = bool | int | float | str


def select_hparams(config: dict[str, Any], overrides: list[str]) -> dict[str, Plain]:
    """The values that ``config["hparams"]`` names, and all that were overridden, as ``{dotted key: value}``.

    But for paths and the run's name, which are none.

    A class stands as its last name, None as the word none, a list as its text, and a typed group of several
    classes (``callbacks=early_stopping``) as the choice. A job of a sweep shows what the sweep varies, and no more.
    """
    choices = {}
    for override in overrides:
        key, _, choice = override.lstrip("+~").partition("=")
        if not key.startswith(("paths.", "hydra.")) and key != "name":
            choices[key.replace("/", ".")] = choice
    selected: dict[str, Plain] = {}
    job = (config.get("sweep") or {}).get("job") or {}
    varied = [key.lstrip("+").replace("/", ".") for key in job.get("varied", [])]
    for key in varied or [*config["hparams"], *choices]:
        node: Any = config
        for part in key.split("."):
            node = node.get(part, _ABSENT) if isinstance(node, dict) else _ABSENT
        if isinstance(node, dict) and key in choices and (varied or "_target_" not in node):
            selected[key] = choices[key]
        elif node is not _ABSENT:
            selected |= _flatten(node, key)
    return selected


_ABSENT = object()


def _flatten(node: Any, key: str) -> dict[str, Plain]:
    if not isinstance(node, dict):
        return {key: node if isinstance(node, bool | int | float | str) else "none" if node is None else str(node)}
    flat: dict[str, Plain] = {}
    for name, child in node.items():
        if name == "_target_":
            flat[key] = str(child).rpartition(".")[2]
        elif not name.startswith("_"):
            flat |= _flatten(child, f"{key}.{name}")
    return flat
