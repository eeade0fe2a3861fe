"""A net cut into stages on several ranks, which work on micro-batches one after another: the strategy `pipeline`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchmetrics import Metric

from project.batch import batch_length
from project.compiled import is_compiled
from project.errors import UserError
from project.strategies.batches import share
from project.strategies.mesh import MeshStrategy
from project.strategies.pipeline_checkpoint import gathered, own_optimizer_state
from project.strategies.pipeline_layout import layout_of
from project.strategies.pipelined_net import PipelinedNet
from project.strategies.placement import take_buffers, take_from_rank_zero
from project.strategies.sharded_checkpoint import is_sharded, load_sharded
from project.strategies.single_process import named_submodules
from project.strategies.stages import taken_out
from project.strategies.user_step import UserStep
from project.tracking.arrivals import OWN_GROUP


class PipelineStrategy(MeshStrategy):
    """Cuts a net that is a chain of parts into stages, by torch's pipelining; several pipelines share the batch.

    Of N ranks, R consecutive ones form a pipeline: each holds its stages' weights, gradients and optimizer states,
    reads the same share of the batch, and passes activations on. The N / R pipelines average their gradients. The
    LightningModule needs to know nothing of it: ``training_step`` is run for each micro-batch, on the last rank with
    the net's output. The loss is the mean over micro-batches, and so that of the batch where it is a mean over its
    samples, as DDP requires it too. Everywhere else a call of the net returns the whole output to all ranks, so that
    metrics are those of one device, and their values the same on all ranks.

    In training, batch norm normalizes each micro-batch by itself, and each moves its running statistics. Dropout
    draws other numbers than on one device. What ``training_step`` returns beside the loss is dropped; where it logs or
    updates metrics, the ranks wait for each other in every step to learn of it.

    Args:
        schedule: ``gpipe`` runs all micro-batches forward, then all backward; ``1f1b`` keeps no more activations than
            there are stages; ``interleaved`` also gives each rank several stages, for less waiting and more traffic.
        micro_batches: Equal parts M that a pipeline's share of the batch is cut into; ``auto`` takes as many as
            divide it, up to four for each stage. Of R equally fast ranks each works for M / (M + R - 1) of the time.
        stages: Of one pipeline; ``auto`` makes one of all ranks of a host.
        stages_per_rank: ``auto`` is 2 for ``interleaved`` and else 1.
        modules: Dotted name of the submodule that is cut, the only one with weights to train.
        process_group_backend: By default NCCL for CUDA, gloo for the CPU.
        timeout: Of the process group, where no launcher has made it already.

    Raises:
        UserError: an argument can't be, the ranks are no multiple of R, or the model can't be trained so.
    """

    inner = "pipeline"

    def __init__(
        self,
        schedule: str = "1f1b",
        micro_batches: int | str = "auto",
        stages: int | str = "auto",
        stages_per_rank: int | str = "auto",
        modules: Sequence[str] = ("net",),
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        if len(self.modules) > 1:
            raise UserError(
                f"trainer.strategy.modules={self.modules} are several, and a pipeline is made of one: type "
                f"trainer.strategy.modules=[{self.modules[0]}]"
            )
        self.arguments = {
            "schedule": schedule, "micro_batches": micro_batches, "stages": stages, "stages_per_rank": stages_per_rank,
        }  # fmt: skip
        self._net: PipelinedNet | None = None
        self._step: UserStep | None = None
        self._step_tells: bool | None = None  # whether training_step logs; known after the first
        self._seed = 0
        self._averages_gradients = True

    def ranks_per_model(self) -> int:
        return layout_of(self.arguments, self.num_processes).ranks

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._device_mesh is not None
        return self._device_mesh["pipeline"].get_group()

    # Setting up.

    def spread(self, trainer: L.Trainer) -> None:
        model = self.lightning_module
        assert model is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not model.automatic_optimization:
            raise UserError(
                f"{type(model).__name__} optimizes by hand, which needs the loss of the whole batch at once, and a "
                "pipeline goes back after each micro-batch: return the loss instead, or type trainer/strategy=fsdp"
            )
        net = named_submodules(model, self.modules, "pipeline")[self.modules[0]]
        if fitting:
            self._refuse_what_cannot_work(model, net)
        if self._net is None or self._net.module is not net:
            for path, part in model.named_modules():
                if is_compiled(part):
                    raise UserError(
                        f"trainer.strategy=pipeline runs {self.modules[0]} on several ranks, and torch.compile, which "
                        f"compiled {path or type(part).__name__}, would trace it as a whole: type model.compile=false, "
                        "or trainer/strategy=fsdp"
                    )
            take_from_rank_zero(chain(model.parameters(), model.buffers()), self.root_device)
            layout = layout_of(self.arguments, self.num_processes)
            context = self.precision_plugin.forward_context
            self._net = PipelinedNet(net, self.modules[0], layout, self._group, self.root_device, context)
        self._step = UserStep(model, self._net, self.precision_plugin.train_step_context)
        net.__dict__["forward"] = self._net
        # As FSDP has it in a plugin of its own: the norm that gradients are clipped by is of all ranks' gradients.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def model_to_device(self) -> None:
        assert self.model is not None
        if self._net is None:
            super().model_to_device()
            return
        with taken_out(self.model, self.modules):
            super().model_to_device()
        self._net.to_device()

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers if self._net is not None else ():
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UserError(
                    "optimizer LBFGS runs the step several times and compares all weights at once, which ranks that "
                    "hold some each can't do: type optimizer=sgd, or trainer.devices=1"
                )
            for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
                del optimizer.state[parameter]

    def _refuse_what_cannot_work(self, model: L.LightningModule, net: nn.Module) -> None:
        if self._layer_sync is not None or any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()):
            raise UserError(
                "trainer.strategy=pipeline normalizes each micro-batch by itself and can't synchronise batch norm over "
                "ranks: type trainer.sync_batchnorm=false, or trainer/strategy=ddp"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise UserError(
                "trainer.precision=16-mixed scales the loss before it goes backward, and a pipeline goes back before "
                "it knows the loss of the batch: type trainer.precision=bf16-mixed, or trainer/strategy=fsdp"
            )
        inside = {
            id(p) for part in (net, *(m for m in model.modules() if isinstance(m, Metric))) for p in part.parameters()
        }
        for path, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                raise UserError(
                    f"{type(model).__name__}.{path} is a parameter outside of {self.modules[0]}, which alone a "
                    "pipeline trains: move it into a part of the net's chain, or type trainer/strategy=fsdp"
                )

    def on_train_start(self) -> None:
        super().on_train_start()
        self._step_tells = None
        if self._net is not None:
            told = [torch.initial_seed()]
            dist.broadcast_object_list(told, group=self._group, group_src=0)
            self._seed = told[0]

    def share_buffers(self) -> None:
        super().share_buffers()
        if self._net is not None:
            assert self.model is not None
            with taken_out(self.model, self.modules):  # what training_step may count
                take_buffers(self.model, self._group, source=self._net.layout.ranks - 1)

    def teardown(self) -> None:
        if self._net is not None:
            self._net.module.__dict__.pop("forward", None)
            self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        super().teardown()

    # A step.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._net is None:
            return super().training_step(*args, **kwargs)
        assert self._step is not None
        net, step = self._net, self._step
        batch, *rest = args
        number, rows = self._cut(batch)
        seeds = [self._seed_of(index) for index in range(number)]

        def arguments(index: int) -> tuple[Any, ...]:
            part = share(batch, number * rows, slice(index * rows, (index + 1) * rows), self.root_device)
            return (part, *rest)

        def loss_of(index: int, output: Tensor) -> Tensor:
            return step.loss_of(arguments(index), output, seeds[index]) / number

        step.begin()
        inputs = [step.input_of(arguments(i), seeds[i]) for i in (range(number) if net.is_first else range(1))]
        parameters = [p for p in net.module.parameters() if p.requires_grad and not p.is_meta]
        accumulated = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss = net.train(inputs, number, loss_of)
        gradients = [p.grad for p in parameters]
        for parameter, gradient in zip(parameters, accumulated, strict=True):
            parameter.grad = gradient
        self._tell(step)

        def hand_over(scale: Tensor) -> list[Tensor | None]:
            return self._averaged(parameters, [g if g is None else g.mul_(scale) for g in gradients])

        anchor = torch.zeros((), device=loss.device, requires_grad=True)  # for a rank without weights to train
        return _GradientsKnown.apply(loss, hand_over, anchor, *parameters)  # type: ignore[no-untyped-call]

    def _cut(self, batch: Any) -> tuple[int, int]:
        """Micro-batches and their length."""
        assert self._net is not None
        layout = self._net.layout
        length = batch_length(batch)
        number = layout.cut(length) if length else None
        if not length or number is None:
            raise UserError(
                f"a pipeline's share of the batch, {length or 'of no known length'}, can't be cut into equal "
                f"micro-batches: give each pipeline a multiple of {layout.unit()} samples, or type "
                "trainer.strategy.schedule=gpipe trainer.strategy.micro_batches=1"
            )
        return number, length // number

    def _seed_of(self, micro_batch: int) -> int:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        assert trainer is not None
        return random.Random(f"{self._seed}/{trainer.fit_loop.total_batch_idx}/{micro_batch}").getrandbits(63)

    def _tell(self, step: UserStep) -> None:
        """Log on all ranks what the last one's training step logs; nobody waits where the first step logs nothing."""
        assert self._net is not None
        told = [step.told() if self._net.is_last else {}]
        if self._step_tells is not False:
            dist.broadcast_object_list(told, group=self._group, group_src=self._net.layout.ranks - 1)
            step.hear(told[0])
            self._step_tells = self._step_tells or bool(told[0])
        elif told[0]:
            names = ", ".join([*told[0]["logged"], *told[0]["metrics"]])
            raise UserError(
                f"{type(step.module).__name__}.training_step logs or counts {names} in a later step, and logged "
                "nothing in the first, from which the ranks of a pipeline know whether to ask each other: log in "
                "the first step too, or type trainer/strategy=fsdp"
            )

    def _averaged(self, parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients to add to the parameters'; in the last of accumulated batches the mean over all pipelines."""
        assert self._device_mesh is not None
        pipelines = self._device_mesh["data_parallel"].size()
        if pipelines == 1 or not self._averages_gradients:
            return gradients
        totals: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            total = torch.zeros_like(parameter) if gradient is None else gradient
            totals.append(total if parameter.grad is None else total.add_(parameter.grad))
            parameter.grad = None
        works = [dist.all_reduce(total, group=self.data_parallel_group, async_op=True) for total in totals]
        for work in works:
            work.wait()
        return [total.div_(pipelines) for total in totals]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._averages_gradients = False
        try:
            yield
        finally:
            self._averages_gradients = True

    def gradient_norm(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """The norm of all gradients on all ranks of the pipeline, (); all ranks call this."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._net is None:
            return own
        squares = own.to(self.root_device, torch.float64) ** 2  # a rank without gradients knows no type of theirs
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt().to(parameters[0].dtype)

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grads_with_norm_(parameters, clip_val, self.gradient_norm(optimizer))

    # Checkpoints: one plain file, whose names and numbers are those of one device.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0; nothing elsewhere."""
        self.share_buffers()
        assert self.model is not None
        state = self.model.state_dict()
        if self._net is None:
            return state
        first = self._net.is_first
        of_net = f"{self._net.name}."
        own = {name: t for name, t in state.items() if not t.is_meta and (first or name.startswith(of_net))}
        parts = self._gathered(own)
        merged = {name: value for part in parts for name, value in part.items()}
        return {name: merged[name] for name in state} if merged else {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = plain.state_dict()
        if self._net is None:
            return state
        parts = self._gathered(own_optimizer_state(state, plain)["state"])
        merged = {index: values for part in parts for index, values in part.items()}
        return state | {"state": {index: merged[index] for index in sorted(merged)}} if parts else {}

    @cached_property
    def _savers(self) -> Any:
        """The first pipeline once more, on the CPU: NCCL would make a communicator for each two, and keep it."""
        assert self._device_mesh is not None
        return dist.new_group(self._device_mesh.mesh[0].tolist(), backend="gloo", group_desc=OWN_GROUP)

    def _gathered(self, own: Any) -> list[Any]:
        """What the ranks of the first pipeline hold, on rank 0; an empty list elsewhere."""
        savers = self._savers  # which all ranks make
        return gathered(own, savers) if isinstance(savers, dist.ProcessGroup) else []

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        if is_sharded(path):
            return load_sharded(path, {}, weights_only)
        # Mapped, so that a rank reads from the disk no more than its share.
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        own = self.model.state_dict()
        state = {
            name: value.to("meta") if name in own and own[name].is_meta else value
            for name, value in checkpoint["state_dict"].items()
        }
        self.model.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(own_optimizer_state(state, optimizer))


class _GradientsKnown(torch.autograd.Function):
    """A loss whose gradients are there before its backward pass, which hands them over, scaled as it is itself."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, hand_over: Callable[[Tensor], list[Any]], *_: Tensor) -> Tensor:
        ctx.hand_over = hand_over
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.hand_over(scale)
