"""What ``+key=value`` adds to a config, and whether anything reads it."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from project.config.composition import OF_OTHERS, key_hint, top_keys, walk, where_to_add
from project.config.from_checkpoint import FROM_RUN
from project.errors import UserError


def check_added(composed: DictConfig, overrides: list[str], command: str) -> None:
    """Check that something reads what ``+key=value`` adds at the top of the config of ``conf/<command>.yaml``.

    Below the top, it is an argument of the class that stands there, which refuses what it does not take. A key is read
    too where another value refers to it, as ``${key}``.

    Raises:
        UserError: nothing reads it, so it would be without effect.
    """
    added = [OverridesParser.create().parse_override(text) for text in overrides if text.startswith("+")]
    if not added:
        return
    values = str(OmegaConf.to_container(composed, resolve=False))
    referred_to = re.findall(r"\$\{(?:oc\.select:)?(\w+)(?=[.,[}])", values)
    read = {*top_keys(command), *FROM_RUN, *referred_to}
    for override in added:
        key = override.package or override.key_or_group
        top = re.split(r"[./]", key)[0]
        if top not in composed or top in read:
            continue
        known = [name for name in walk(composed) if name.partition(".")[0] in read]
        hint = f": {OF_OTHERS[top]}" if top in OF_OTHERS else key_hint(key, known) or f": {where_to_add(top)}"
        raise UserError(f"+{key} would be without effect, because nothing reads {top}{hint}")
