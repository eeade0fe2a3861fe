"""Models that are spread over ranks: FSDP, tensor parallel, and both."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchmetrics import Metric

from project.errors import UserError
from project.strategies.placement import is_parallel, parallelize, take_buffers_from_rank_zero
from project.strategies.sharded_checkpoint import (
    gathered,
    is_sharded,
    load_sharded,
    parameters_by_index,
    save_sharded,
    spread_like,
    spread_optimizer_state,
)


# Not a subclass of Lightning's ModelParallelStrategy, under which the Trainer refuses float64 and a gradient scaler.
class ShardedStrategy(ParallelStrategy):
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

    def __init__(
        self,
        tensor_parallel_size: int | str = 1,
        reshard_after_forward: bool = True,
        save: str = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__()
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
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._device_mesh: DeviceMesh | None = None

    # Who and where.

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """(data_parallel, tensor_parallel); None on one rank."""
        return self._device_mesh

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that together hold each sample once, for everything that is counted; None on one rank."""
        return self._device_mesh["data_parallel"].get_group() if self._device_mesh is not None else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._device_mesh is None:
            return {"num_replicas": 1, "rank": 0}
        mesh = self._device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    @property
    def is_first_with_its_data(self) -> bool:
        """Whether this rank stands for all that read the same batches: where each sample is to be written once."""
        return self._device_mesh is None or self._device_mesh["tensor_parallel"].get_local_rank() == 0

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    # Setting up.

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        size = self.num_processes if self.tensor_parallel_size == "auto" else int(self.tensor_parallel_size)
        check_divides(size, self.world_size)
        if self.world_size == 1:
            return  # one rank trains as any other does
        reset_seed()
        assert self.cluster_environment is not None
        device = self.root_device
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            device
        )
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        if self._device_mesh is None:  # a second entry point goes on with the model as it is spread
            self._device_mesh = init_device_mesh(
                device.type,
                (self.world_size // size, size),
                mesh_dim_names=("data_parallel", "tensor_parallel"),
            )
            if 1 < size < self.world_size:
                # Sums over both dimensions in one operation, which is faster and equal on all ranks to the last bit.
                self._device_mesh._flatten("data_and_tensor_parallel")
                # What can't be done in one operation, DTensor warns of; there is nothing that a user could do.
                logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # for a configure_model that uses it

    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._device_mesh is not None:
            _check_no_copies(trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if self._device_mesh is not None and not is_parallel(self.model):
            if self._layer_sync is not None and fitting:
                self.model = self._layer_sync.apply(self.model)
            parallelize(self.model, self._device_mesh, self.reshard_after_forward)
        _materialize_distributed_module(self.model, self.root_device)
        self.model_to_device()  # what is not spread
        for part in self.model.modules():
            if isinstance(part, Metric) and part.process_group is None:
                part.process_group = self.data_parallel_group
        self.barrier()
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._share_random_state()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._share_buffers()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._share_random_state()  # rank 0 alone may have drawn for a log

    def on_test_start(self) -> None:
        super().on_test_start()
        self._share_buffers()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._share_buffers()

    def teardown(self) -> None:
        # The model stays on its devices: what is spread can't be moved to the CPU.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _share_buffers(self) -> None:
        """Statistics of batch norm are each rank's own; evaluated and saved are rank 0's, as in DDP."""
        if self._device_mesh is not None:
            assert self.model is not None
            take_buffers_from_rank_zero(self.model)

    def _share_random_state(self) -> None:
        """Ranks that compute the same activations must draw the same dropout."""
        if self._device_mesh is None or self._device_mesh["tensor_parallel"].size() == 1:
            return
        group = self._device_mesh["tensor_parallel"].get_group()
        cuda = torch.cuda.get_rng_state(self.root_device) if self.root_device.type == "cuda" else None
        told = [(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())]
        dist.broadcast_object_list(told, group=group, group_src=0)
        cpu, cuda, python, numpy = told[0]
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.root_device)
        random.setstate(python)
        np.random.set_state(numpy)

    # Talking to each other.

    def barrier(self, name: str | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            if dist.get_backend() == "nccl":
                dist.barrier(device_ids=[self.root_device.index])
            else:
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        told = [obj]
        dist.broadcast_object_list(told, src)
        return told[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Over the ranks that hold different samples, unless a group is named: nothing is counted twice."""
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group or self.data_parallel_group, reduce_op=reduce_op)
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        if self._device_mesh is None:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else bool(votes)

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def _saves_shards(self) -> bool:
        return self.save == "sharded" and self._device_mesh is not None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards; or all, on rank 0 only, where they are saved as one file."""
        self._share_buffers()
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
        path = Path(self.broadcast(str(filepath)))
        if self._saves_shards:
            save_sharded(checkpoint, path, self.global_rank)
            return
        if self.is_global_zero and is_sharded(path):
            self.remove_checkpoint(path)
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        assert self.model is not None
        if not is_sharded(path):
            # Mapped, so that a rank reads from the disk no more than its share.
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return checkpoint
        like = {f"state_dict.{name}": value for name, value in self.model.state_dict().items()}
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


def _check_no_copies(trainer: L.Trainer) -> None:
    """Lightning's weight averaging copies the model before it is spread, and could not average the two.

    Raises:
        UserError: the trainer has such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise UserError(
                f"{type(callback).__name__} keeps a copy of the whole model, which a model that is spread over ranks "
                "can't be averaged with: type trainer/strategy=ddp, or leave the callback out"
            )


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
