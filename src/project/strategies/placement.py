"""From a net and its plan to parameters that are spread over a mesh of ranks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchmetrics import Metric

from project.errors import UserError, did_you_mean
from project.models.plan import ParallelPlan


def parallelize(module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool = True) -> None:
    """Spread the parameters of a module's children, in place: every parameter becomes a DTensor, on one mesh.

    All ranks get the weights of rank 0.

    Args:
        module: Of any training logic; its children are the nets, whose ``forward`` is what runs in parallel.
        mesh: (data_parallel, tensor_parallel).
        reshard_after_forward: Give a block's gathered weights back until the backward pass.

    Raises:
        UserError: a plan does not fit the net or the number of ranks, or a parameter belongs to no net, or to two.
    """
    nets = dict(_nets(module))
    _check_parameters_have_a_net(module, nets.values())
    _check_parameters_have_one_net(module, nets)
    plans = _plans(module)
    device = torch.device(mesh.device_type)  # the current one
    take_from_rank_zero(chain(module.parameters(), module.buffers()), device)
    data_parallel, tensor_parallel = mesh["data_parallel"], mesh["tensor_parallel"]
    blocks = _blocks(nets, plans)  # before splitting, so that a bad pattern is told first
    for parameter in module.parameters() if data_parallel.size() > 1 else ():
        # FSDP shards no other order, such as channels_last; convolutions bring the weights that they gather into it.
        parameter.data = parameter.data.contiguous()
    if tensor_parallel.size() > 1:
        _split(nets, plans, tensor_parallel)
        for net in nets.values():
            _replicate(net, tensor_parallel, device)
    if data_parallel.size() > 1:
        for unit in (*blocks, *nets.values()):
            unit.register_forward_hook(_own_output)
        for block in blocks:
            fully_shard(block, mesh=data_parallel, reshard_after_forward=reshard_after_forward)
        for net in _innermost_first(nets.values()):
            if not isinstance(net, FSDPModule):
                fully_shard(net, mesh=data_parallel)


def is_parallel(module: nn.Module) -> bool:
    """Whether somebody has spread parts of the module already."""
    return any(isinstance(part, FSDPModule) for part in module.modules()) or any(
        isinstance(parameter, DTensor) for parameter in module.parameters()
    )


def take_buffers(module: nn.Module, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Give all ranks of a group one rank's saved buffers (batch norm's statistics), as DDP does.

    Those of metrics are left alone, and so are those that this rank has not (on the meta device).
    """
    for part in _modules_with_parameters_or_buffers(module):
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta and name not in part._non_persistent_buffers_set:
                dist.broadcast(buffer, group_src=source, group=group)


def _nets(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have parameters and are called: lists and dicts of modules are looked into."""
    for name, child in module.named_children():
        if isinstance(child, Metric) or not any(True for _ in child.parameters()):
            continue
        if type(child).forward is nn.Module.forward or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _nets(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_parameters_have_a_net(module: nn.Module, nets: Iterable[nn.Module]) -> None:
    covered = {id(p) for net in nets for p in net.parameters()}
    covered |= {id(p) for part in module.modules() if isinstance(part, Metric) for p in part.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in covered:
            raise UserError(
                f"{type(module).__name__}.{name} is a parameter outside of any net, so it can't be spread over ranks: "
                "move it into a module that uses it in its forward, or type trainer/strategy=ddp"
            )


def _check_parameters_have_one_net(module: nn.Module, nets: dict[str, nn.Module]) -> None:
    """Each net is spread for itself: what two of them share would become two parameters that train apart."""
    first: dict[int, tuple[str, str]] = {}
    for net, part in nets.items():
        for name, parameter in part.named_parameters(net):
            other, its_name = first.setdefault(id(parameter), (net, name))
            if other != net and not _is_within(part, nets[other]) and not _is_within(nets[other], part):
                raise UserError(
                    f"{its_name} and {name} of {type(module).__name__} are one parameter of two nets, which would be "
                    f"spread over ranks apart: put {other} and {net} into one module whose forward calls both, or type "
                    "trainer/strategy=ddp"
                )


def _plans(module: nn.Module) -> list[tuple[str, nn.Module, ParallelPlan]]:
    """Name, module and plan of each module that has one."""
    found = []
    for name, part in module.named_modules():
        plan = getattr(part, "parallel_plan", None)
        if plan is not None:
            if not isinstance(plan, ParallelPlan):
                raise UserError(
                    f"{type(part).__name__}.parallel_plan is a {type(plan).__name__}: return a "
                    "project.models.plan.ParallelPlan, from a property"
                )
            found.append((name, part, plan))
    return found


def matching(pattern: str, owner: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that a pattern names.

    Raises:
        UserError: there is none.
    """
    expression = re.compile(r"[^.]+".join(re.escape(part) for part in pattern.split("*")))
    names = dict(owner.named_modules(remove_duplicate=False))
    matching = [(name, module) for name, module in names.items() if expression.fullmatch(name)]
    if not matching:
        general = sorted({re.sub(r"\b\d+\b", "*", name) for name in names if name})
        raise UserError(
            f"{type(owner).__name__}.parallel_plan names {pattern}, and no module is called so"
            f"{did_you_mean(pattern, general) or ': it has ' + ', '.join(general)}"
        )
    return matching


def _blocks(nets: dict[str, nn.Module], plans: list[tuple[str, nn.Module, ParallelPlan]]) -> list[nn.Module]:
    """What FSDP gathers one at a time, innermost first; not what shares a parameter with another part of its net."""
    planned = [block for _, owner, plan in plans for pattern in plan.blocks for _, block in matching(pattern, owner)]
    blocks: list[nn.Module] = []
    for net in nets.values():
        own = set(net.modules())
        uses = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
        blocks += [
            block
            for block in [block for block in planned if block in own] or _blocks_by_default(net)
            if all(uses[id(p)] == _count(block, p) for p in block.parameters())
        ]
    return _innermost_first(dict.fromkeys(block for block in blocks if any(True for _ in block.parameters())))


def _innermost_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    every = list(modules)
    return sorted(every, key=lambda module: sum(_is_within(other, module) for other in every))


def _is_within(inner: nn.Module, outer: nn.Module) -> bool:
    return any(part is inner for part in outer.modules())


def _blocks_by_default(net: nn.Module) -> list[nn.Module]:
    """The children of the outermost lists and sequences; not those that are part of another one."""
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        if isinstance(module, nn.Sequential | nn.ModuleList):
            blocks.extend(child for child in module if type(child).forward is not nn.Module.forward)
        else:
            for child in module.children():
                search(child)

    search(net)
    return [
        block for block in blocks if not any(block is not other and block in set(other.modules()) for other in blocks)
    ]


def _count(module: nn.Module, parameter: nn.Parameter) -> int:
    return sum(p is parameter for _, p in module.named_parameters(remove_duplicate=False))


def _split(nets: dict[str, nn.Module], plans: list[tuple[str, nn.Module, ParallelPlan]], mesh: DeviceMesh) -> None:
    """Split the linear layers that the plans name over the ranks of ``mesh``."""
    ranks = mesh.size()
    styles: dict[nn.Module, ColwiseParallel | RowwiseParallel] = {}
    for _, owner, plan in plans:
        if plan.heads is not None and plan.columns and plan.heads % ranks:
            raise UserError(
                f"{type(owner).__name__} has {plan.heads} attention heads, and {ranks} ranks of tensor parallel can't "
                f"share them equally: type trainer.strategy.tensor_parallel_size={math.gcd(plan.heads, ranks)}, or a "
                f"model.net.heads that is a multiple of {ranks}"
            )
        for patterns, way, style in (
            (plan.columns, "output", ColwiseParallel),
            (plan.rows, "input", RowwiseParallel),
        ):
            for name, layer in (found for pattern in patterns for found in matching(pattern, owner)):
                if not isinstance(layer, nn.Linear):
                    raise UserError(
                        f"{type(owner).__name__}.parallel_plan splits {name}, which is a {type(layer).__name__}: name "
                        "linear layers only"
                    )
                features = layer.out_features if way == "output" else layer.in_features
                if features % ranks:
                    raise UserError(
                        f"{type(owner).__name__}.{name} has {features} {way} features, and {ranks} ranks of tensor "
                        f"parallel can't share them equally: type trainer.strategy.tensor_parallel_size="
                        f"{math.gcd(features, ranks)}, or give the layer a multiple of {ranks}"
                    )
                styles[layer] = style()
    if not styles:
        names = " and ".join(type(net).__name__ for net in nets.values()) or "the model"
        raise UserError(
            f"{names} can't be split by tensor parallel, as no parallel_plan says which linear layers may be: type "
            "trainer/strategy=fsdp, or write the plan (see project.models.plan)"
        )
    _check_split_alone(nets, styles)
    for layer, how in styles.items():
        parallelize_module(layer, mesh, how)


def _check_split_alone(nets: dict[str, nn.Module], layers: Container[nn.Module]) -> None:
    """A layer is split by itself, and what shares its weight would keep the whole one."""
    uses: dict[int, list[str]] = {}
    split: set[int] = set()
    for prefix, net in nets.items():
        for name, part in net.named_modules(prefix=prefix):
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    uses.setdefault(id(parameter), []).append(f"{name}.{key}")
                    split |= {id(parameter)} if part in layers else set()
    for names in (uses[parameter] for parameter in split):
        if len(names) > 1:
            raise UserError(
                f"{' and '.join(names)} are one parameter, of which tensor parallel would split one place alone: leave "
                "the layer out of its net's parallel_plan, or type trainer/strategy=fsdp"
            )


def _replicate(net: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Make DTensors of the parameters that are not split, whole on every rank.

    Mixed with DTensors, plain parameters break gradient clipping and the optimizers' ``foreach``. In ``forward``
    they are plain all the same, so that any layer works and none pays for DTensor's dispatch.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that two layers share stays one
    for part in _modules_with_parameters_or_buffers(net):
        names = [n for n, p in part._parameters.items() if p is not None and not isinstance(p, DTensor)]
        for name in names:
            plain = part._parameters[name]
            assert plain is not None
            if plain not in done:
                spread = DTensor.from_local(plain.detach().to(device), mesh, [Replicate()], run_check=False)
                done[plain] = nn.Parameter(spread, requires_grad=plain.requires_grad)
            part._parameters[name] = done[plain]
        if names:
            _LocalInForward(names).attach(part)


class _LocalInForward:
    """Shows a module the local tensors of its replicated parameters while its ``forward`` runs.

    Gradients flow back to the parameters. They are equal on all ranks of tensor parallel without communication,
    because the activations are.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.held: dict[str, Any] = {}

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.show)
        module.register_forward_hook(self.restore, always_call=True)

    def show(self, module: nn.Module, args: Any) -> None:
        self.held = {name: module._parameters[name] for name in self.names}
        for name, parameter in self.held.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local()  # type: ignore[assignment]

    def restore(self, module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(self.held)
        self.held = {}


def _own_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A split layer gives out a view, on which an operation in place would silently lose FSDP's hook."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() and output.requires_grad else output


def _modules_with_parameters_or_buffers(module: nn.Module) -> Iterator[nn.Module]:
    """All parts of a module that hold tensors themselves; metrics, whose tensors are their own business, left out."""
    if isinstance(module, Metric):
        return
    if module._parameters or module._buffers:
        yield module
    for child in module.children():
        yield from _modules_with_parameters_or_buffers(child)


def take_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give all ranks rank 0's values, one tensor at a time."""
    for tensor in tensors:
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.data.copy_(sent)
