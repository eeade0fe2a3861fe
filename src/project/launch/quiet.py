"""What libraries say of themselves: kept out, or told as the rest is told."""

from __future__ import annotations

import logging
import warnings

# Of these texts' beginnings, as regular expressions, nothing follows for a user.
NEEDLESS = (
    r"The `srun` command is available",  # ranks are started by our launcher, or by srun itself
    r".*does not have many workers",  # data in memory want none
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning's, against the newest torch
    r"The number of training batches \(\d+\) is smaller than the logging",  # it counts steps across epochs
    r"Couldn't infer the batch indices",  # our samplers know them
    r"Be aware that when using `ckpt_path`, callbacks",  # evaluation wants the weights only
    r".*functional\.all_gather is deprecated",  # Lightning's, against the newest torch
    r"You passed in a `val_dataloader` but have no `validation_step`",  # told where something monitors it
    r"Checkpoint directory .* exists and is not empty",  # best and last share theirs
    r"'pin_memory' argument is set as true but no accelerator",  # it is without effect there
    r"You called `self.log\(.*but have no logger configured",  # logger=none was typed
    r"GPU available but not used",  # trainer.accelerator=cpu was typed
    r"Experiment logs directory .* exists and is not empty",  # a run that goes on keeps its rows
)


def quiet_libraries() -> None:
    """Keep what Lightning says of itself out of the log: devices, strategy and paths stand in our own lines."""
    import lightning  # noqa: F401  (sets the levels that are changed here)

    from project.notices import show_warnings_plainly

    show_warnings_plainly()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.propagate = not logger.handlers  # Hydra's handler would print all a second time
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # its report is what was asked for
    for message in NEEDLESS:
        warnings.filterwarnings("ignore", message)
