"""What strategies have in common whose one process drives all devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from project.errors import UserError, nearest

SEED_STRIDE = 1_000_003  # a prime: the seeds of neighbouring devices don't meet those of neighbouring runs


class ReplacedForward:
    """In place of the ``forward`` of one instance, while a strategy runs: its module is not wrapped.

    Checkpoints are as ever, and the module's own hooks run once, with what it is called with.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.called = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, pickled or deep (as for averaged weights), is a plain one.
        return getattr, (self.module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` returns."""
        raise NotImplementedError


class SingleProcessStrategy(ParallelStrategy):
    """Replaces the `forward` of chosen submodules by one over all devices, from setup to teardown.

    A subclass names itself and says what stands in place of `forward`. On one device nothing is replaced.

    Args:
        modules: Dotted names of the submodules.
        accelerator: As Lightning's strategies, like the rest.
        parallel_devices: Likewise.
        cluster_environment: Likewise.
        checkpoint_io: Likewise.
        precision_plugin: Likewise.

    Raises:
        UserError: Something is asked for that one process can't do: several hosts or ranks, SyncBatchNorm, sharded
            parameters, other accelerators than cpu and cuda, modules that there are not or that a step does not call.
    """

    strategy_name: ClassVar[str]
    alternative: ClassVar[str] = "ddp"  # the strategy that does likewise on several processes
    is_distributed = False  # Lightning replaces samplers where this is true

    def __init__(
        self,
        modules: Sequence[str] = ("net",),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        self.num_nodes = 1  # the Trainer sets it
        self._replaced: list[ReplacedForward] = []

    def replacement(self, module: nn.Module, name: str) -> ReplacedForward:
        """What is called in place of the `forward` of a chosen module, on several devices."""
        raise NotImplementedError

    @classmethod
    def register(cls) -> None:
        """Make the strategy's name known to Lightning's Trainer; again, if need be."""
        if cls.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(cls.strategy_name, cls, description=cls.__doc__ or "")

    # One process: rank 0 of 1, whatever the cluster.
    global_rank = local_rank = node_rank = 0
    world_size = 1
    is_global_zero = True

    @property
    def root_device(self) -> torch.device:
        return self._devices[0]

    @property
    def devices_of_process(self) -> list[torch.device]:
        """All on which random numbers are drawn."""
        return self._devices

    @property
    def _devices(self) -> list[torch.device]:
        assert self.parallel_devices
        return self.parallel_devices

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        # The last thing the Trainer does with a strategy while it is built: here all is known but the model.
        if not isinstance(self.accelerator, CPUAccelerator | CUDAAccelerator):
            raise UserError(
                f"trainer.strategy={self.strategy_name} runs on cpu and cuda, not on "
                f"{type(self.accelerator).__name__}: type trainer.accelerator=cpu, or trainer/strategy=auto"
            )
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.cluster_environment is not None:
            world_size = max(world_size, self.cluster_environment.world_size())
        if self.num_nodes > 1 or world_size > 1:
            found = f"trainer.num_nodes={self.num_nodes}" if self.num_nodes > 1 else f"WORLD_SIZE={world_size}"
            raise UserError(
                f"trainer.strategy={self.strategy_name} is one process on one host, but {found}: type "
                f"trainer/strategy={self.alternative}, or start one process, without torchrun or srun"
            )
        if self._layer_sync is not None:
            raise UserError(self._no_synchronised_batch_norm("trainer.sync_batchnorm=true"))

    def _no_synchronised_batch_norm(self, asked_by: str) -> str:
        return (
            f"trainer.strategy={self.strategy_name} has no ranks and can't synchronise batch norm, and {asked_by} asks "
            "for it: use BatchNorm, or type trainer/strategy=ddp"
        )

    def chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        """The submodules that `modules` names."""
        chosen = named_submodules(model, self.modules, self.strategy_name)
        for path, part in model.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise UserError(self._no_synchronised_batch_norm(path))
        for name, module in chosen.items():
            for path, parameter in module.named_parameters(prefix=name):
                if isinstance(parameter, DTensor):
                    raise UserError(
                        f"trainer.strategy={self.strategy_name} needs whole parameters, and {path} is sharded over "
                        "processes: type trainer/strategy=fsdp, or leave the sharding out"
                    )
        return chosen

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        for name, module in self.chosen(model).items():
            if len(self._devices) > 1:
                module.__dict__["forward"] = replacement = self.replacement(module, name)
                self._replaced.append(replacement)
        return model

    def on_train_start(self) -> None:
        for replacement in self._replaced:
            replacement.called = False  # in the sanity check it may have been
        # torch seeds all devices alike, and each would draw the same dropout as the others. In a run that goes on they
        # have their own states again.
        taken: set[int] = set()
        for index, device in enumerate(self._devices if self.root_device.type == "cuda" else ()):
            with torch.cuda.device(device):
                seed = torch.cuda.initial_seed()
                if seed in taken:
                    seed = torch.initial_seed() + index * SEED_STRIDE
                    torch.cuda.manual_seed(seed)
                taken.add(seed)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self._replaced and not any(replacement.called for replacement in self._replaced):
            raise UserError(
                f"trainer.strategy={self.strategy_name} spreads {' and '.join(self.modules)} over the devices, and the "
                f"training step of {type(self.lightning_module).__name__} did not call it: type "
                f"trainer.strategy.modules=[NAME] with what the step calls, or trainer/strategy={self.alternative}"
            )
        return output

    def teardown(self) -> None:
        while self._replaced:
            self._replaced.pop().module.__dict__.pop("forward", None)
        super().teardown()

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        return decision

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, name: str | None = None) -> None:
        pass


def is_in(part: nn.Module, module: nn.Module) -> bool:
    """Whether a module is, or holds, the very part."""
    return any(part is m for m in module.modules())


def named_submodules(model: nn.Module, names: Sequence[str], strategy: str) -> dict[str, nn.Module]:
    """The submodules that ``trainer.strategy.modules`` names.

    Raises:
        UserError: there are none such, they are not called, or one holds the other.
    """
    there = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    at_top = ", ".join(name for name, _ in model.named_children()) or "none"
    if not names:
        raise UserError(
            f"trainer.strategy.modules is empty, which leaves nothing to make parallel ({type(model).__name__} has "
            f"{at_top}): type trainer.strategy.modules=[NAME]"
        )
    chosen: dict[str, nn.Module] = {}
    for name in names:
        if name not in there:
            match = nearest(name, there) or nearest(name.rpartition(".")[2], there)
            raise UserError(
                f"trainer.strategy.modules names {name}, which {type(model).__name__} does not have (it has {at_top}): "
                f"type trainer/strategy={strategy} trainer.strategy.modules=[{match or 'NAME'}]"
            )
        if type(there[name]).forward is nn.Module.forward:
            inside = ",".join(f"{name}.{child}" for child, _ in there[name].named_children())
            raise UserError(
                f"trainer.strategy.modules names {name}, a {type(there[name]).__name__}, which is never called: type "
                f"trainer/strategy={strategy} trainer.strategy.modules=[{inside or 'NAME'}]"
            )
        for other, module in chosen.items():
            if is_in(module, there[name]) or is_in(there[name], module):
                raise UserError(
                    f"trainer.strategy.modules names {other} and {name}, one of which holds the other, and a batch is "
                    f"split once: type trainer.strategy.modules=[{min(other, name, key=len)}]"
                )
        chosen[name] = there[name]
    return chosen
