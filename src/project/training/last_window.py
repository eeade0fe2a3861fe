"""Gradient accumulation at the end of an epoch."""

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer


class LastWindow(Callback):
    """Makes the step over the last batches of an epoch a mean over them, however few they are.

    Lightning divides each loss by ``trainer.accumulate_grad_batches``, also where fewer batches are left. Our own
    loaders leave no such rest; those of other data modules and ``trainer.limit_train_batches`` may.
    """

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        # Here gradients are complete, synchronised and unscaled, and not clipped yet.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        if batches and pl_module.automatic_optimization:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(trainer.accumulate_grad_batches / batches)
