"""Is the monitored metric one that the model logs? Known after one validation batch, before any training."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from project.errors import UserError, nearest


class MonitorCheck(Callback):
    """Compares what the config monitors with what the sanity check logged.

    Names that begin with ``train`` are logged later; Lightning itself refuses them at their first use.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        nodes = [config, config.get("scheduler") or {}, *(config.get("callbacks") or {}).values()]
        monitors = (node.get("monitor") for node in nodes if isinstance(node, dict))
        self.monitors = {name for name in monitors if name and not name.startswith("train")}

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = sorted(trainer.callback_metrics)
        for name in sorted(self.monitors.difference(logged)):
            choices = ", ".join(logged) if logged else "nothing"
            advice = nearest(name, logged) or (logged[0] if logged else "null")
            raise UserError(
                f"monitor={name} is not among what {type(pl_module).__name__} logs in validation ({choices}): "
                f"type monitor={advice}"
            )
