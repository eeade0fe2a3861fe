"""Weights & Biases gets what TensorBoard gets: curves, figures, texts and the config."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from project.errors import UserError
from project.tracking.logger_state import keep, kept, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class WandbRun(WandbLogger):
    """Lightning's logger for Weights & Biases; a run that goes on is the same one there.

    Its files lie in ``<run_dir>/wandb``. Points that were logged after the checkpoint from which a run goes on stay:
    the service takes none back.

    Args:
        run_dir: The run folder.
        more: Of ``wandb.init``, as ``project``, ``entity``, ``group``, ``tags``.
    """

    def __init__(self, run_dir: str, **more: Any) -> None:
        super().__init__(save_dir=run_dir, name=title(run_dir), id=kept(run_dir, "wandb").get("id"), **more)
        self._wandb_init.pop("anonymous", None)  # which wandb is about to drop
        self._run_dir = run_dir

    @rank_zero_only
    def start_run(self, config: dict[str, Any], environment: dict[str, Any], hparams: dict[str, Any]) -> None:
        """Log what is known before the first step; all of the config, since columns are picked there.

        Raises:
            UserError: there is no account to log to, or the service can't be reached.
        """
        import wandb

        try:
            _ = self.experiment
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"logger=wandb can't begin ({reason}): type wandb login, or WANDB_MODE=offline before the command"
            ) from error
        self.experiment.config.update(config | {"environment": environment}, allow_val_change=True)
        keep(self._run_dir, "wandb", id=self.experiment.id)

    @rank_zero_only
    def add_figure(self, tag: str, figure: Figure, step: int) -> None:
        """Log a figure of matplotlib."""
        self.log_image(tag, [figure], step)

    @rank_zero_only
    def add_text(self, tag: str, text: str, step: int) -> None:
        """Log a text as it is, line by line."""
        import wandb

        self.log_metrics({tag: wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    @rank_zero_only
    def finish_run(self) -> None:
        """Hand over what is left, and end the service's process."""
        self.experiment.finish()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Lightning calls this after fit and after test alike; only a failure is the end of the run."""
        if status == "failed" and self._experiment is not None:
            self.experiment.finish(exit_code=1)
