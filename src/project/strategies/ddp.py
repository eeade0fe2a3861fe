"""DDP with communication hooks on every backend, and with few global synchronisations."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel


class CompressedDDPStrategy(DDPStrategy):
    """DDP that sends gradients compressed.

    Lightning registers communication hooks on CUDA only and says nothing elsewhere; here they are registered on
    every device, or refused.

    Args:
        hook: ``bf16`` or ``fp16`` halve what is sent; ``powersgd`` sends factors of low rank
            (https://arxiv.org/abs/1905.13727), far less, with the error carried over to the next step.
        rank: Of PowerSGD's factors; a higher one is closer to plain DDP.
        start_step: Step from which PowerSGD compresses: early gradients suffer most.
        ddp: Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        ValueError: The hook is unknown, or needs NCCL where there is none.
    """

    def __init__(self, hook: str = "powersgd", rank: int = 2, start_step: int = 100, **ddp: Any) -> None:
        super().__init__(**ddp)
        if hook not in ("bf16", "fp16", "powersgd"):
            raise ValueError(f"trainer.strategy.hook={hook} is unknown: type bf16, fp16 or powersgd")
        if rank < 1:
            raise ValueError(f"trainer.strategy.rank={rank} must be at least 1: type trainer.strategy.rank=2")
        if start_step < 2:
            raise ValueError(
                f"trainer.strategy.start_step={start_step}: DDP rebuilds its buckets after the first step, PowerSGD "
                "starts later: type trainer.strategy.start_step=2 or more"
            )
        self.hook = hook
        self.rank = rank
        self.start_step = start_step
        self._state: powerSGD_hook.PowerSGDState | None = None

    def on_train_start(self) -> None:
        super().on_train_start()
        step = _steps_before(self)
        if self._state is None or not step:
            return
        self._state.iter = min(step, self.start_step - 2)  # two steps, as at the start, until DDP has its buckets
        if step > self.start_step and self.is_global_zero:
            print(
                "Going on without the errors that PowerSGD carried over, which each rank had of its own and no "
                "checkpoint holds: it compresses again after two steps",
                flush=True,
            )

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.start_step,
                # Gradients of a shape that repeats are compressed together.
                batch_tensors_with_same_shape=True,
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            self._state = state
        elif self.hook == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.root_device.type == "cuda":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        else:
            raise ValueError(
                f"trainer.strategy.hook=bf16 needs NCCL, and these ranks are on {self.root_device.type}: type "
                "trainer/strategy=ddp_powersgd, or trainer.strategy.hook=fp16, or trainer/strategy=ddp"
            )


class LocalSGDStrategy(DDPStrategy):
    """Post-local SGD (https://arxiv.org/abs/1808.07217): after some steps, average weights now and then.

    The ranks of one group go on averaging gradients at every step; the groups average their weights every
    ``period`` steps. Weights are averaged too before every validation and every checkpoint, so that what is
    evaluated and saved is one model.

    Args:
        period: Steps between two averages over all ranks.
        start_step: Step until which gradients are averaged over all ranks, as in plain DDP.
        group: Ranks that average gradients at every step: ``host`` (those of one host), or a number that divides
            the number of ranks. 1, the default, synchronises the least.
        ddp: Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        ValueError: A number is below 1, the group does not divide the ranks, or the model has several optimizers.
    """

    def __init__(self, period: int = 8, start_step: int = 100, group: int | str = 1, **ddp: Any) -> None:
        super().__init__(**ddp)
        if period < 1 or start_step < 0:
            raise ValueError(
                f"trainer.strategy.period={period} and start_step={start_step} must be at least 1 and 0: type "
                "trainer.strategy.period=8 trainer.strategy.start_step=100"
            )
        self.period = period
        self.start_step = start_step
        self.group = group
        self._state: Any = None
        self._averager: PeriodicModelAverager | None = None

    def on_train_start(self) -> None:
        super().on_train_start()
        step = _steps_before(self)
        if self._averager is None or not step:
            return
        self._state.iter = self._averager.step = step
        if step > self.start_step and self.is_global_zero and any(self.optimizers[0].state.values()):
            print(
                "Going on with rank 0's optimizer state on all ranks: under local SGD each had one of its own, and a "
                "checkpoint holds one",
                flush=True,
            )

    def _register_ddp_hooks(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

        assert isinstance(self.model, DistributedDataParallel)
        size = self.num_processes if self.group == "host" else int(self.group)
        if size < 1 or self.world_size % size:
            raise ValueError(
                f"trainer.strategy.group={self.group} does not divide the {self.world_size} ranks: type host, or a "
                "number that does"
            )
        subgroup, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
        state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None,
            subgroup=subgroup,
            start_localSGD_iter=self.start_step,
            post_local_gradient_allreduce=size > 1,
        )
        self.model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        self._state = state
        self._averager = PeriodicModelAverager(period=self.period, warmup_steps=self.start_step)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                f"trainer/strategy=ddp_local_sgd counts the steps of one optimizer, and "
                f"{type(self.lightning_module).__name__} has {len(self.optimizers)}: type "
                "trainer/strategy=ddp_find_unused"
            )

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        if self._averager is not None:
            self._averager.average_parameters(p for group in optimizer.param_groups for p in group["params"])
        return output

    def on_validation_start(self) -> None:
        self._average_now()
        super().on_validation_start()

    def on_train_end(self) -> None:
        self._average_now()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._average_now()  # all ranks collect the state, rank 0 writes it
        return super().lightning_module_state_dict()

    def _average_now(self) -> None:
        trainer = self.lightning_module.trainer if isinstance(self.lightning_module, L.LightningModule) else None
        if self._averager is None or trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.data.div_(self.world_size))


def _steps_before(strategy: DDPStrategy) -> int:
    """Steps of a run that goes on; 0 of a new one."""
    assert strategy.lightning_module is not None
    return strategy.lightning_module.trainer.global_step
