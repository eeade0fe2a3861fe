"""Data parallelism in one process: the strategy `dp`, which Lightning removed in 2.0.

What is made parallel is the `forward` of chosen submodules, not the step: the loss, metrics, `self.log` and manual
optimization see the full batch, once, so that a weighted loss is what it is on one device.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import replicate

from project.errors import UserError, nearest

SEED_STRIDE = 1_000_003  # a prime: the seeds of neighbouring replicas don't meet those of neighbouring runs

ReplicaObserver = Callable[[int, torch.device], AbstractContextManager[Any]]


def register() -> None:
    """Make `Trainer(strategy="dp")` known to Lightning; again, if need be."""
    if DataParallelStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            DataParallelStrategy.strategy_name,
            DataParallelStrategy,
            description="One process, the forward of chosen submodules on several devices",
        )


class DataParallelStrategy(ParallelStrategy):
    """Splits what chosen submodules are called with over the devices, and joins what they return.

    Inputs: tensors whose first dimension is the batch's length (that of the first tensor) are split as `torch.chunk`
    does, so chunks may be uneven and a small batch uses fewer devices. A list of the batch's length holds one item per
    sample and is split too, unless its tensors have that length themselves. Dicts, tuples, other lists and dataclasses
    are searched. Everything else goes to each replica whole: also a tensor of another length, so a tensor that is not
    of the batch but could have its length by chance belongs into a buffer.

    Outputs: tensors are concatenated on the first dimension, lists with an item per sample too; dicts, tuples, other
    lists and dataclasses are searched; other values must be equal and pass through. A tensor without dimensions, such
    as a loss, is refused: the mean of the replicas' means is not the mean.

    Buffers: replica 0's survive. Batch norm's running statistics come from replica 0's chunk, normalization in
    training is over each chunk. Plain attributes that `forward` sets on its module are lost. Hooks of a chosen module
    run once, with the full batch; those of modules in it run in each replica.

    On CPU, `devices=N` makes N replicas that share the parameters. They run one after another, since threads share
    one random state and dropout would not be reproducible.

    Args:
        modules: Dotted names of the submodules whose `forward` is made parallel.
        threaded: A thread per replica. By default on CUDA only.
        accelerator: As Lightning's strategies, like the rest.
        parallel_devices: Likewise.
        cluster_environment: Likewise.
        checkpoint_io: Likewise.
        precision_plugin: Likewise.

    Set `observe_replica`, before `setup`, to a function of a replica's index and device to enter the context that it
    returns around each replica's `forward`, in the replica's thread and stream.

    Raises:
        UserError: Something is asked for that one process can't do: several hosts or ranks, SyncBatchNorm, sharded
            parameters, `torch.compile`, other accelerators than cpu and cuda, modules that there are not.
    """

    strategy_name = "dp"
    is_distributed = False  # Lightning replaces samplers where this is true

    def __init__(
        self,
        modules: Sequence[str] = ("net",),
        threaded: bool | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        self.threaded = threaded
        self.observe_replica: ReplicaObserver | None = None
        self.num_nodes = 1  # the Trainer sets it
        self._parallel: list[nn.Module] = []

    # One process: rank 0 of 1, whatever the cluster.
    global_rank = local_rank = node_rank = 0
    world_size = 1
    is_global_zero = True

    @property
    def root_device(self) -> torch.device:
        return self._devices[0]

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
                f"trainer.strategy=dp runs on cpu and cuda, not on {type(self.accelerator).__name__}: "
                "type trainer.accelerator=cpu, or trainer/strategy=auto"
            )
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.cluster_environment is not None:
            world_size = max(world_size, self.cluster_environment.world_size())
        if self.num_nodes > 1 or world_size > 1:
            found = f"trainer.num_nodes={self.num_nodes}" if self.num_nodes > 1 else f"WORLD_SIZE={world_size}"
            raise UserError(
                f"trainer.strategy=dp is one process on one host, but {found}: type trainer/strategy=ddp, or start "
                "one process, without torchrun or srun"
            )
        if self._layer_sync is not None:
            raise UserError(_SYNC_BATCH_NORM.format("trainer.sync_batchnorm=true"))

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Replace the instances' `forward` until teardown. No module is wrapped, so checkpoints are as ever."""
        chosen = _chosen(model, self.modules)
        _refuse_what_cannot_work(model, chosen)
        for name, module in chosen.items() if len(self._devices) > 1 else ():
            threaded = self.root_device.type == "cuda" if self.threaded is None else self.threaded
            module.__dict__["forward"] = ParallelForward(module, name, self._devices, threaded, self.observe_replica)
            self._parallel.append(module)
        return model

    def on_train_start(self) -> None:
        # torch seeds all devices alike, and each would draw the same dropout as the others.
        for index, device in enumerate(self._devices):
            if index and device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(torch.initial_seed() + index * SEED_STRIDE)

    def teardown(self) -> None:
        while self._parallel:
            self._parallel.pop().__dict__.pop("forward", None)
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


_SYNC_BATCH_NORM = (
    "trainer.strategy=dp can't synchronise batch norm over its replicas, and {} asks for it: use BatchNorm, whose "
    "statistics are replica 0's, or type trainer/strategy=ddp"
)


def _chosen(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
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
                f"type trainer/strategy=dp trainer.strategy.modules=[{match or 'NAME'}]"
            )
        for other, module in chosen.items():
            if _is_in(module, there[name]) or _is_in(there[name], module):
                raise UserError(
                    f"trainer.strategy.modules names {other} and {name}, one of which holds the other, and a batch is "
                    f"split once: type trainer.strategy.modules=[{min(other, name, key=len)}]"
                )
        chosen[name] = there[name]
    return chosen


def _refuse_what_cannot_work(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    for path, part in model.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise UserError(_SYNC_BATCH_NORM.format(path))
        compiled = part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule"
        for name, module in chosen.items():
            if compiled and (_is_in(part, module) or _is_in(module, part)):
                raise UserError(
                    f"trainer.strategy=dp makes new replicas of {name} in each step, and torch.compile, which compiled "
                    f"{path or type(part).__name__}, can't follow: type model.compile=false, or trainer/strategy=ddp"
                )
            if "forward" in vars(part) and _is_in(part, module):
                raise UserError(
                    f"trainer.strategy=dp makes replicas of {name} from its class, and {path} has a forward that was "
                    "set on the instance, which they can't have: define it in the class, or type trainer/strategy=ddp"
                )
    for name, module in chosen.items():
        for path, parameter in module.named_parameters(prefix=name):
            if isinstance(parameter, DTensor):
                raise UserError(
                    f"trainer.strategy=dp needs whole parameters, and {path} is sharded over processes: "
                    "type trainer/strategy=fsdp, or leave the sharding out"
                )


def _is_in(part: nn.Module, module: nn.Module) -> bool:
    return any(part is m for m in module.modules())


class ParallelForward:
    """In place of a module's `forward`: split, run the replicas, join."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        devices: Sequence[torch.device],
        threaded: bool,
        observe: ReplicaObserver | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.devices = devices
        self.threaded = threaded
        self.observe = observe

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, pickled or deep (as for averaged weights), is a plain one.
        return getattr, (self.module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = batch_length((args, kwargs))
        rows = chunks(batch or 0, len(self.devices))
        if len(rows) < 2:
            return type(self.module).forward(self.module, *args, **kwargs)
        devices = self.devices[: len(rows)]
        shares = [share((args, kwargs), batch, part, device) for part, device in zip(rows, devices, strict=True)]
        replicas = self._replicate(devices)
        pairs = zip(self.module.modules(), replicas[0].modules(), strict=True)
        buffers = [(original, replica, replica._buffers.copy()) for original, replica in pairs]
        outputs = self._run(replicas, shares, devices)
        # What replica 0 changed in place is changed in the original too; what it replaced is not yet.
        for original, replica, before in buffers:
            for name, buffer in replica._buffers.items():
                if buffer is not before.get(name):
                    original._buffers[name] = buffer
        return gather(outputs, [len(range(*part.indices(batch or 0))) for part in rows], devices[0], self.name)

    def _replicate(self, devices: Sequence[torch.device]) -> list[nn.Module]:
        if devices[0].type == "cuda":
            replicas = replicate(self.module, devices, detach=not torch.is_grad_enabled())
        else:
            replicas = replicate_sharing(self.module, len(devices))
        for replica in replicas:
            del replica.__dict__["forward"]  # copied from the original, where it is this object
        return replicas

    def _run(self, replicas: list[nn.Module], shares: list[Any], devices: Sequence[torch.device]) -> list[Any]:
        on_device = [_placed(device) for device in devices]
        modes = _modes(devices[0].type)

        def run(index: int) -> Any:
            args, kwargs = shares[index]
            try:
                with on_device[index](), self._observed(index):
                    # Not called as a module: hooks of the original have run, with the full batch.
                    return replicas[index].forward(*args, **kwargs)
            except Exception as error:
                error.add_note(f"in replica {index} of {len(replicas)} of {self.name}, on {devices[index]}")
                raise

        def run_in_thread(index: int) -> Any:
            with modes():
                return run(index)

        if not self.threaded:
            return [run(index) for index in range(len(replicas))]
        with ThreadPoolExecutor(len(replicas), thread_name_prefix=f"dp-{self.name}") as pool:
            running = [pool.submit(run_in_thread, index) for index in range(len(replicas))]
        return [future.result() for future in running]  # raises the first replica's error, with its traceback

    def _observed(self, index: int) -> AbstractContextManager[Any]:
        return self.observe(index, self.devices[index]) if self.observe else nullcontext()


def _placed(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context that makes a device, and the stream that the calling thread uses on it, current."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(device)

    @contextmanager
    def placed() -> Iterator[None]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield

    return placed


def _modes(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """The context that carries the calling thread's modes into another thread, where torch has the defaults."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast = {
        kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {device_type, "cpu"}
    }

    @contextmanager
    def carried() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (dtype, enabled) in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return carried


def replicate_sharing(module: nn.Module, number: int) -> list[nn.Module]:
    """Replicas that share the parameters, so that gradients add up in the original's `.grad`.

    The first shares the buffers too, the others have copies of their own.
    """
    originals = list(module.modules())
    replicas = []
    for index in range(number):
        replica_of = {original: _shallow_replica(original) for original in originals}
        own: dict[Tensor, Tensor] = {}  # by original: modules may have buffers in common
        for original, replica in replica_of.items():
            state = replica.__dict__
            state["_parameters"] = original._parameters.copy()
            if index and original._buffers:
                for buffer in original._buffers.values():
                    if buffer is not None and buffer not in own:
                        own[buffer] = buffer.detach().clone()
                state["_buffers"] = {name: b if b is None else own[b] for name, b in original._buffers.items()}
            if original._modules:
                state["_modules"] = {name: m if m is None else replica_of[m] for name, m in original._modules.items()}
        replicas.append(replica_of[module])
    return replicas


def _shallow_replica(module: nn.Module) -> nn.Module:
    if type(module)._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        special: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # RNNs
        return special
    # The same as Module's own, in a tenth of the time, most of which goes into setting attributes of a module.
    replica = module.__new__(type(module))
    replica.__dict__.update(module.__dict__)
    replica.__dict__.update(_buffers=module._buffers.copy(), _modules={}, _is_replica=True)
    return replica


def chunks(length: int, number: int) -> list[slice]:
    """The rows of each chunk, as `torch.chunk` makes them: at most `number`, equal but for the last."""
    size = max(1, -(-length // number))
    return [slice(start, start + size) for start in range(0, length, size)]


def batch_length(value: Any) -> int | None:
    """The first dimension of the first tensor in a structure, or else the length of the first list; None without."""
    length = _first_length(value)
    if length is not None:
        return length
    if isinstance(value, list):
        return len(value)
    return next((n for n in map(batch_length, _children(value).values()) if n is not None), None)


def _first_length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if isinstance(value, list):
        # Tensors of different lengths, dicts and dataclasses are samples; their lengths say nothing of the batch's.
        lengths = {_first_length(item) for item in value if isinstance(item, Tensor)}
        if len(lengths) > 1 or any(isinstance(item, Mapping) or dataclasses.is_dataclass(item) for item in value):
            return None
    return next((n for n in map(_first_length, _children(value).values()) if n is not None), None)


def share(value: Any, batch: int | None, rows: slice, device: torch.device) -> Any:
    """One replica's part of a structure, on its device; ``batch`` None shares nothing out."""
    if isinstance(value, Tensor):
        # A slice, not torch.split, whose results can't be changed in place.
        part = value[rows] if value.ndim and len(value) == batch else value
        return part.to(device, non_blocking=True)
    if batch is not None and _is_samples(value, batch):
        return [share(item, None, rows, device) for item in value[rows]]
    return _rebuilt(value, {key: share(child, batch, rows, device) for key, child in _children(value).items()})


def gather(outputs: list[Any], lengths: list[int], device: torch.device, name: str) -> Any:
    """What the replicas returned, each for as many samples as ``lengths`` says, as one output on ``device``.

    Raises:
        UserError: the outputs can't be joined; ``name`` says what they are outputs of.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        raise UserError(_differ(name, [type(output).__name__ for output in outputs]))
    if isinstance(first, Tensor):
        if any(output.ndim == 0 for output in outputs):
            raise UserError(
                f"{name} returned a tensor without dimensions, such as a loss, and trainer.strategy=dp joins the "
                "replicas' outputs along the batch: compute it outside of the module, in the step, on the full batch, "
                "or type trainer/strategy=ddp"
            )
        if len({output.shape[1:] for output in outputs}) > 1:
            raise UserError(_differ(name, [f"shape {tuple(output.shape)}" for output in outputs]))
        return torch.cat([output.to(device, non_blocking=True) for output in outputs])
    full = isinstance(first, list) and [len(output) for output in outputs] == lengths
    if full and any(_is_samples(output, length) for output, length in zip(outputs, lengths, strict=True)):
        return [share(item, None, slice(None), device) for output in outputs for item in output]
    children = [_children(output) for output in outputs]
    if any(child.keys() != children[0].keys() for child in children):
        raise UserError(_differ(name, [f"keys {list(child)}" for child in children]))
    if children[0]:
        joined = {
            key: gather([child[key] for child in children], lengths, device, f"{name}: {key}") for key in children[0]
        }
        return _rebuilt(first, joined)
    if not all(output is first or _equal(output, first) for output in outputs):
        raise UserError(_differ(name, [repr(output)[:40] for output in outputs]))
    return first


def _differ(name: str, found: list[str]) -> str:
    return (
        f"{name} returned from the replicas of trainer.strategy=dp what can't be joined, {', '.join(found)}: return "
        "tensors that differ in the first dimension at most, or type trainer/strategy=ddp"
    )


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (ValueError, RuntimeError):  # arrays
        return False


def _is_samples(value: Any, length: int) -> bool:
    """Whether a value is a list with one item per sample, not one of tensors that hold an item per sample each."""
    if not isinstance(value, list) or len(value) != length:
        return False
    tensors = [item for item in value if isinstance(item, Tensor)]
    return not tensors or any(_first_length(tensor) != length for tensor in tensors)


def _children(value: Any) -> dict[Any, Any]:
    """The parts of a dict, list, tuple or dataclass; none of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list) or type(value) is tuple or hasattr(value, "_fields"):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def _rebuilt(value: Any, children: Mapping[Any, Any]) -> Any:
    """A value of the same type with other parts."""
    if not children:
        return value
    if isinstance(value, list):
        return list(children.values())
    if isinstance(value, tuple):
        return type(value)(*children.values()) if hasattr(value, "_fields") else tuple(children.values())
    rebuilt = copy.copy(value)
    for key, child in children.items():
        if isinstance(value, Mapping):
            rebuilt[key] = child
        else:
            object.__setattr__(rebuilt, key, child)  # frozen dataclasses too
    return rebuilt
