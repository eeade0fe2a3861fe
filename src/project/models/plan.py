"""How a net may be spread over devices, said by the net itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelPlan:
    """What a net's `parallel_plan` (a property or an attribute) tells the sharding strategies.

    Names are those of `net.named_modules()`; a `*` stands for one part of a name: `blocks.*.attention.q`.

    Between a linear layer that is split by columns and the one split by rows that follows it, a rank holds its
    share of the features only. What stands there must treat each feature, or each head, alone: activations,
    dropout, attention; no normalization over the features.

    Attributes:
        blocks: Modules to gather one at a time under FSDP: while one computes, only its weights are whole.
        columns: Linear layers whose output features are split over the ranks of tensor parallel.
        rows: Linear layers whose input features are split; each reads what a layer of `columns` wrote.
        heads: Attention heads that `columns` hold, which can't be split themselves.
        chain: Modules which, called one after another, each with what the one before returned, are the net's whole
            `forward`: what `pipeline` and `layer_split` cut into stages. A `*` stands for all its modules in order.
    """

    blocks: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    heads: int | None = None
    chain: tuple[str, ...] = ()
