"""What strategies have in common whose ranks hold parts of one model: who reads which data, and who counts it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchmetrics import Metric

from project.errors import UserError
from project.strategies.placement import take_buffers


# Not a subclass of Lightning's ModelParallelStrategy, under which the Trainer refuses float64 and a gradient scaler.
class MeshStrategy(ParallelStrategy):
    """Ranks in a mesh (data_parallel, ``inner``): those of one row hold one model together and read the same batch.

    A subclass names the inner dimension, says how many ranks it has, and spreads the model over it. One rank alone
    has no mesh, and trains as any other does.

    Args:
        process_group_backend: By default NCCL for CUDA, gloo for the CPU.
        timeout: Of the process group, where no launcher has made it already.
    """

    inner: ClassVar[str]

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta = default_pg_timeout, **base: Any
    ) -> None:
        super().__init__(**base)
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._device_mesh: DeviceMesh | None = None

    def ranks_per_model(self) -> int:
        """Ranks that hold one model together.

        Raises:
            UserError: all ranks can't be shared out to such groups.
        """
        raise NotImplementedError

    def spread(self, trainer: L.Trainer) -> None:
        """Spread ``self.model`` over the mesh, unless it is already; called by every entry point of the trainer.

        Raises:
            UserError: it can't be.
        """
        raise NotImplementedError

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
        """(data_parallel, inner); None on one rank."""
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
        return self._device_mesh is None or self._device_mesh[self.inner].get_local_rank() == 0

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
        size = self.ranks_per_model()
        if self.world_size == 1:
            return
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
                device.type, (self.world_size // size, size), mesh_dim_names=("data_parallel", self.inner)
            )

    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._device_mesh is not None:
            check_no_copies(trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if self._device_mesh is not None:
            self.spread(trainer)
        self.model_to_device()
        for part in self.model.modules():
            if isinstance(part, Metric) and part.process_group is None:
                part.process_group = self.data_parallel_group
        self.barrier()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.share_buffers()

    def on_test_start(self) -> None:
        super().on_test_start()
        self.share_buffers()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self.share_buffers()

    def share_buffers(self) -> None:
        """Statistics of batch norm are each rank's own; evaluated and saved are those of the first, as in DDP."""
        if self._device_mesh is not None:
            assert self.model is not None
            take_buffers(self.model, self.data_parallel_group)

    def teardown(self) -> None:
        # The model stays on its devices: what is spread can't be moved to the CPU.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

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

    # Checkpoints: a rank takes its part of them, so the model is spread first.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        super().save_checkpoint(checkpoint, self.broadcast(str(filepath)), storage_options)


def check_no_copies(trainer: L.Trainer) -> None:
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
