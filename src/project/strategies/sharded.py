"""Models that are spread over ranks: FSDP, tensor parallel, and both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from project.errors import UserError
from project.strategies.checkpoint_files import CheckpointFiles
from project.strategies.mesh import MeshStrategy
from project.strategies.placement import is_parallel, parallelize
from project.strategies.random_state import random_state, set_random_state
from project.strategies.sharded_checkpoint import (
    WEIGHTS,
    gathered,
    is_sharded,
    load_sharded,
    parameters_by_index,
    save_sharded,
    spread_like,
    spread_optimizer_state,
    take_apart,
)
from project.tracking.arrivals import OWN_GROUP


class ShardedStrategy(MeshStrategy):
    """Spreads parameters, gradients and optimizer states over the ranks, by torch's FSDP2 and DTensor.

    Of N ranks, T consecutive ones form a group of tensor parallel: they read the same batch and split linear layers
    as the net's ``parallel_plan`` says. The N / T groups share the batch and shard everything among them (FSDP). The
    LightningModule needs to know nothing of it; one that spreads itself in ``configure_model`` is left as it is.

    Dropout where tensor parallel has whole activations is the same on the ranks of a group, since they draw equal
    random numbers; where activations are split, the shares of the ranks are dropped by equal patterns.

    Args:
        tensor_parallel_size: T, or ``auto`` for all ranks of a host. 1 is plain FSDP.
        reshard_after_forward: Under FSDP, keep a block's weights only while it computes. ``false`` keeps them until
            the backward pass: less communication, more memory.
        save: ``sharded`` lets each rank write its part to a folder during training: fast, and no rank needs memory
            for the whole. ``single`` gathers everything to rank 0 for each checkpoint, and writes one plain file.
        process_group_backend: By default NCCL for CUDA, gloo for the CPU.
        timeout: Of the process group, where no launcher has made it already.

    Raises:
        UserError: the ranks are no multiple of T, or the model can't be spread so.
    """

    inner = "tensor_parallel"

    def __init__(
        self,
        tensor_parallel_size: int | str = 1,
        reshard_after_forward: bool = True,
        save: str = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        is_size = isinstance(tensor_parallel_size, int) and tensor_parallel_size >= 1
        if tensor_parallel_size != "auto" and not is_size:
            raise UserError(
                f"trainer.strategy.tensor_parallel_size={tensor_parallel_size} can't be: type a whole number from 1, "
                "or auto for all ranks of a host"
            )
        if save not in ("sharded", "single"):
            raise UserError(f"trainer.strategy.save={save} is unknown: type trainer.strategy.save=sharded or single")
        self.tensor_parallel_size = tensor_parallel_size
        self.reshard_after_forward = reshard_after_forward
        self.save = save

    def ranks_per_model(self) -> int:
        size = self.num_processes if self.tensor_parallel_size == "auto" else int(self.tensor_parallel_size)
        check_divides(size, self.world_size)
        return size

    def setup_environment(self) -> None:
        is_new = self._device_mesh is None
        super().setup_environment()
        if self._device_mesh is None:
            return
        if is_new and 1 < self._device_mesh["tensor_parallel"].size() < self.world_size:
            # Sums over both dimensions in one operation, which is faster and equal on all ranks to the last bit.
            self._device_mesh._flatten("data_and_tensor_parallel")
            # What can't be done in one operation, DTensor warns of; there is nothing that a user could do.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # for a configure_model that uses it

    def spread(self, trainer: L.Trainer) -> None:
        assert self.model is not None
        assert self._device_mesh is not None
        if is_parallel(self.model):
            return
        if self._layer_sync is not None and trainer.state.fn == TrainerFn.FITTING:
            self.model = self._layer_sync.apply(self.model)
        parallelize(self.model, self._device_mesh, self.reshard_after_forward)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and self._device_mesh is not None and self._device_mesh["tensor_parallel"].size() > 1:
            agree_on_overflow(scaler, self._device_mesh["tensor_parallel"].get_group())

    def model_to_device(self) -> None:
        assert self.model is not None
        _materialize_distributed_module(self.model, self.root_device)
        super().model_to_device()  # what is not spread

    def on_train_start(self) -> None:
        super().on_train_start()
        self._share_random_state()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._share_random_state()  # rank 0 alone may have drawn for a log

    def _share_random_state(self) -> None:
        """Ranks that compute the same activations must draw the same dropout."""
        if self._device_mesh is None or self._device_mesh["tensor_parallel"].size() == 1:
            return
        told = [random_state(self.root_device)]
        dist.broadcast_object_list(told, group=self._device_mesh["tensor_parallel"].get_group(), group_src=0)
        set_random_state(told[0], self.root_device)

    # Checkpoints.

    @property
    def _saves_shards(self) -> bool:
        return self.save == "sharded" and self._device_mesh is not None

    @cached_property
    def _writers(self) -> dist.ProcessGroup:
        """All ranks once more, on the CPU: what they send to write shards is apart from what the training sends."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", group_desc=OWN_GROUP)
        return group

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards; or all, on rank 0 only, where they are saved as one file."""
        self.share_buffers()
        assert self.model is not None
        state = self.model.state_dict()
        if self._saves_shards or self._device_mesh is None:
            return state
        return gathered(state, self.global_rank) or {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        if self._saves_shards or self._device_mesh is None:
            return state
        return gathered(state, self.global_rank) or {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(str(filepath)))  # rank 0's, since every rank writes there
        if self._saves_shards:
            shards, files = take_apart(checkpoint), self.checkpoint_io
            write = partial(save_sharded, group=self._writers)
            if isinstance(files, CheckpointFiles):
                files.save(write, shards, path, storage_options)
            else:
                write(shards, path)
            return
        if self.is_global_zero and is_sharded(path):
            self.remove_checkpoint(path)
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        assert self.model is not None
        if isinstance(self.checkpoint_io, CheckpointFiles):
            self.checkpoint_io.wait()
        if not is_sharded(path):
            # Mapped, so that a rank reads from the disk no more than its share.
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return checkpoint
        like = {f"{key}.{name}": value for name, value in self.model.state_dict().items() for key in WEIGHTS}
        for number, optimizer in enumerate(self.optimizers):
            parameters = parameters_by_index(optimizer.state_dict(), optimizer)
            like |= {f"optimizer_{number}.{index}": parameter for index, parameter in parameters.items()}
        return load_sharded(path, like, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        own = self.model.state_dict()
        state = {name: spread_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.model.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(spread_optimizer_state(state, optimizer))


def agree_on_overflow(scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None) -> None:
    """Let all ranks of a group leave out a step where the gradients of one of them have overflown.

    torch asks those ranks alone that share the first parameter, and under tensor parallel that may be whole on each:
    the ranks that hold other shards would step, with weights and a scale that are no longer the others'.
    """
    if "_unscale_grads_" in vars(scaler):
        return  # a second entry point of the trainer
    unscale = scaler._unscale_grads_

    def unscaled(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = unscale(*args, **kwargs)
        for has_overflown in found.values():
            dist.all_reduce(has_overflown, dist.ReduceOp.MAX, group=group)
        return found

    scaler._unscale_grads_ = unscaled  # type: ignore[method-assign]


def check_divides(tensor_parallel_size: int, world_size: int) -> None:
    """Ranks are shared out to groups of tensor parallel without remainder.

    Raises:
        UserError: they can't be.
    """
    if world_size % tensor_parallel_size:
        devices = -(-world_size // tensor_parallel_size) * tensor_parallel_size
        raise UserError(
            f"trainer.devices={world_size} is no multiple of trainer.strategy.tensor_parallel_size="
            f"{tensor_parallel_size}: type trainer.devices={devices}, or another tensor_parallel_size"
        )
