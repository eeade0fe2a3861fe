"""Data parallelism in one process: the strategy `dp`, which Lightning removed in 2.0.

What is made parallel is the `forward` of chosen submodules, not the step: the loss, metrics, `self.log` and manual
optimization see the full batch, once, so that a weighted loss is what it is on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from project.batch import batch_length
from project.compiled import is_compiled
from project.errors import UserError
from project.strategies.batches import chunks, gather, share
from project.strategies.single_process import ReplacedForward, SingleProcessStrategy, is_in

ReplicaObserver = Callable[[int, torch.device], AbstractContextManager[Any]]


class DataParallelStrategy(SingleProcessStrategy):
    """Splits what chosen submodules are called with over the devices, and joins what they return.

    Batches are split and joined as `project.strategies.batches` says; a small one uses fewer devices.

    Buffers: replica 0's survive. Batch norm's running statistics come from replica 0's chunk, normalization in
    training is over each chunk. Plain attributes that `forward` sets on its module are lost. Hooks of a chosen module
    run once, with the full batch; those of modules in it run in each replica.

    On CPU, `devices=N` makes N replicas that share the parameters. They run one after another, since threads share
    one random state and dropout would not be reproducible.

    Args:
        modules: Dotted names of the submodules whose `forward` is made parallel.
        threaded: A thread per replica. By default on CUDA only.
        base: As of Lightning's strategies.

    Set `observe_replica`, before `setup`, to a function of a replica's index and device to enter the context that it
    returns around each replica's `forward`, in the replica's thread and stream.

    Raises:
        UserError: As `SingleProcessStrategy`; also for `torch.compile`, and outputs that can't be joined.
    """

    strategy_name = "dp"

    def __init__(self, modules: Sequence[str] = ("net",), threaded: bool | None = None, **base: Any) -> None:
        super().__init__(modules, **base)
        self.threaded = threaded
        self.observe_replica: ReplicaObserver | None = None

    def chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        chosen = super().chosen(model)
        for path, part in model.named_modules():
            for name, module in chosen.items():
                if is_compiled(part) and (is_in(part, module) or is_in(module, part)):
                    raise UserError(
                        f"trainer.strategy=dp makes new replicas of {name} in each step, and torch.compile, which "
                        f"compiled {path or type(part).__name__}, can't follow: type model.compile=false, or "
                        "trainer/strategy=ddp"
                    )
                if "forward" in vars(part) and is_in(part, module):
                    raise UserError(
                        f"trainer.strategy=dp makes replicas of {name} from its class, and {path} has a forward that "
                        "was set on the instance, which they can't have: define it in the class, or type "
                        "trainer/strategy=ddp"
                    )
        return chosen

    def replacement(self, module: nn.Module, name: str) -> ReplacedForward:
        threaded = self.root_device.type == "cuda" if self.threaded is None else self.threaded
        return ParallelForward(module, name, self._devices, threaded, self.observe_replica)


class ParallelForward(ReplacedForward):
    """In place of a module's `forward`: split, run the replicas, join."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        devices: Sequence[torch.device],
        threaded: bool,
        observe: ReplicaObserver | None = None,
    ) -> None:
        super().__init__(module, name)
        self.devices = devices
        self.threaded = threaded
        self.observe = observe

    def run(self, *args: Any, **kwargs: Any) -> Any:
        batch = batch_length((args, kwargs))
        rows = chunks(batch or 0, len(self.devices))
        if len(rows) < 2:
            return type(self.module).forward(self.module, *args, **kwargs)
        devices = self.devices[: len(rows)]
        shares = [share((args, kwargs), batch, part, device) for part, device in zip(rows, devices, strict=True)]
        replicas = self._replicate(devices)
        pairs = zip(self.module.modules(), replicas[0].modules(), strict=True)
        buffers = [(original, replica, replica._buffers.copy()) for original, replica in pairs]
        outputs = self._run_replicas(replicas, shares, devices)
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

    def _run_replicas(self, replicas: list[nn.Module], shares: list[Any], devices: Sequence[torch.device]) -> list[Any]:
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
