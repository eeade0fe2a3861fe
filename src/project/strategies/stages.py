"""Where a net is cut into consecutive stages, for strategies that put them on different devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise

from torch import nn

from project.errors import UserError, did_you_mean
from project.models.plan import ParallelPlan
from project.strategies.placement import matching

Part = tuple[str, nn.Module]


def chain_of(net: nn.Module) -> list[Part]:
    """The modules, with their names in the net, which called one after another are its whole ``forward``.

    Those that the net's ``parallel_plan`` names; by default the children of an ``nn.Sequential``.

    Raises:
        UserError: the net has no such chain, or a parameter lies outside of it or in two of its parts.
    """
    name = type(net).__name__
    plan = getattr(net, "parallel_plan", None)
    if isinstance(plan, ParallelPlan) and plan.chain:
        parts = [found for pattern in plan.chain for found in matching(pattern, net)]
    elif type(net) is nn.Sequential:
        parts = list(net._modules.items())  # not its children: a module may recur
    else:
        raise UserError(
            f"{name} can't be cut into stages, as nothing says which modules its forward calls one after another: "
            "give it a parallel_plan with a chain (see project.models.plan), or type trainer/strategy=fsdp"
        )
    for parameter, _ in net.named_parameters(remove_duplicate=False):
        holding = [part for part, _ in parts if parameter.startswith(f"{part}.")]
        if len(holding) != 1:
            where = f"in both {' and '.join(holding)}" if holding else "in none of its parts"
            raise UserError(
                f"{name}.parallel_plan has a chain with {parameter} {where}: name each module that forward calls once, "
                "and put parameters of the net itself into a module that uses them"
            )
    return parts


def split(parts: Sequence[Part], num_stages: int, boundaries: Sequence[str] | None = None) -> list[list[Part]]:
    """Cut a chain into consecutive stages that hold about equally many bytes of parameters and buffers.

    The sum of the squares of the stages' bytes is the least of all cuts'.

    Args:
        parts: The chain.
        num_stages: Number of stages, each of which gets a part at least.
        boundaries: Names of the parts that the second and all later stages begin with, instead.

    Raises:
        UserError: there are fewer parts than stages, or the boundaries name other parts or another number of stages.
    """
    if boundaries is not None:
        starts = _starts(parts, num_stages, boundaries)
    elif len(parts) < num_stages:
        raise UserError(
            f"the net's chain has {len(parts)} parts ({', '.join(name for name, _ in parts)}), too few for "
            f"{num_stages} stages: type trainer.devices={len(parts)}, or take a deeper net"
        )
    else:
        starts = _even_starts([_num_bytes(module) for _, module in parts], num_stages)
    return [list(parts[start:stop]) for start, stop in pairwise([*starts, len(parts)])]


def refuse_tied_weights(stages: Sequence[Sequence[Part]]) -> None:
    """A weight can be trained on one device only.

    Raises:
        UserError: two stages share a parameter or a buffer.
    """
    seen: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, module in stage:
            for inner, tensor in chain(module.named_parameters(name), module.named_buffers(name)):
                first, other = seen.setdefault(id(tensor), (number, inner))
                if first != number:
                    raise UserError(
                        f"{other} and {inner} are one tensor, and stages {first} and {number} can't share it: type "
                        "model.net.tie_weights=false, if the net has that argument, or trainer/strategy=fsdp (ddp "
                        "where two nets share it)"
                    )


@contextmanager
def taken_out(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """The model without some of its parts, which so are not moved with it."""
    places = [(model.get_submodule(owner), key) for owner, _, key in (name.rpartition(".") for name in names)]
    parts = [owner._modules[key] for owner, key in places]
    try:
        for owner, key in places:
            owner._modules[key] = None
        yield
    finally:
        for (owner, key), part in zip(places, parts, strict=True):
            owner._modules[key] = part


def _starts(parts: Sequence[Part], num_stages: int, boundaries: Sequence[str]) -> list[int]:
    names = [name for name, _ in parts]
    for boundary in boundaries:
        if boundary not in names:
            raise UserError(
                f"trainer.strategy.boundaries names {boundary}, which is not among the parts of the net's chain "
                f"({', '.join(names)}){did_you_mean(boundary, names)}"
            )
    starts = [0, *(names.index(boundary) for boundary in boundaries)]
    if len(starts) != num_stages or any(left >= right for left, right in pairwise(starts)):
        raise UserError(
            f"trainer.strategy.boundaries={list(boundaries)} does not cut the net's chain ({', '.join(names)}) into "
            f"{num_stages} stages: name the {num_stages - 1} parts that the later stages begin with, in their order"
        )
    return starts


def _even_starts(costs: Sequence[int], num_stages: int) -> list[int]:
    """Start of each stage; by dynamic programming over the first parts and the first stages."""
    total = [0, *accumulate(costs)]
    # best[n]: the least sum of squares for the first n parts in the stages so far, and where those stages start.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(num_stages):
        ends = range(stage + 1, len(costs) - (num_stages - stage - 1) + 1)
        best = {
            end: min(
                (squares + (total[end] - total[start]) ** 2, [*starts, start])
                for start, (squares, starts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[len(costs)][1]


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in chain(module.parameters(), module.buffers()))
