"""A decoder-only transformer, after GPT-2, with rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from project.models.plan import ParallelPlan

POSITIONS = ("rotary", "learned")


class GPT(nn.Module):
    """Token embedding, `depth` blocks of causal attention and MLP, and the next token's logits.

    Built to be split. Tensor parallel: in each block `attention.q`, `k`, `v` and `mlp.up` split by column,
    `attention.out` and `mlp.down` by row; the heads that a rank computes follow from the weights that it holds.
    Stages of a pipeline: embedding, blocks, norm and head follow one another and pass on (B, T, width). Two stages
    can't share the tied weight: they need `tie_weights=False`.

    Shapes: tokens (B, T) int64 with T <= `context` to logits (B, T, vocab_size).

    Args:
        vocab_size: Number of different tokens.
        context: Longest sequence.
        width: Features of a token.
        depth: Number of blocks.
        heads: Attention heads of a block; each has width / heads features.
        dropout: Share of the features, and of the attention weights, that is dropped in training.
        positions: "rotary" turns queries and keys by their position; "learned" adds a vector for each position.
        tie_weights: Use the embedding's weights in the head too.
        checkpoint_activations: Keep only the blocks' inputs for the backward pass and compute the rest again:
            memory for about a third more time.

    Raises:
        ValueError: A size is out of range, `heads` does not divide `width`, or a sequence is too long.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float = 0.0,
        positions: str = "rotary",
        tie_weights: bool = True,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, context=context, width=width, depth=depth, heads=heads)
        check_heads(width, heads, even=positions == "rotary")
        check_dropout(dropout)
        if positions not in POSITIONS:
            raise ValueError(
                f"model.net.positions={positions} is unknown: "
                f"type {' or '.join(f'model.net.positions={choice}' for choice in POSITIONS)}"
            )
        self.embedding = Embedding(vocab_size, context, width, dropout, learned_positions=positions == "learned")
        rotary_length = context if positions == "rotary" else 0
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, True, rotary_length, checkpoint_activations) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        initialize(self, width, depth)
        if tie_weights:
            self.head.weight = self.embedding.tokens.weight

    @property
    def parallel_plan(self) -> ParallelPlan:
        return block_plan(self.blocks, chain=("embedding", "blocks.*", "norm", "head"))

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.embedding(tokens)
        for block in self.blocks:
            features = block(features)
        logits: Tensor = self.head(self.norm(features))
        return logits


class Embedding(nn.Module):
    """A vector for each token, and one for its place where positions are learned.

    Shapes: tokens (B, T) int64 with T <= `context` to (B, T, width).
    """

    def __init__(self, vocab_size: int, context: int, width: int, dropout: float, learned_positions: bool) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width) if learned_positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        if self.context < T:
            raise ValueError(f"the sequence holds {T} tokens, more than model.net.context={self.context}")
        features: Tensor = self.tokens(tokens)
        if self.positions is not None:
            features = features + self.positions(torch.arange(T, device=tokens.device))
        dropped: Tensor = self.dropout(features)
        return dropped


class Block(nn.Module):
    """Attention and an MLP, each on normalized features and added to them (pre-norm).

    Shapes: (B, T, width) to the same.

    Args:
        width: Features of a token, a multiple of `heads`.
        heads: Attention heads.
        dropout: See `GPT`.
        causal: A token attends to itself and what stands before it; else to all.
        rotary_length: Longest sequence whose positions are marked by rotation; 0 marks none.
        checkpoint_activations: See `GPT`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        causal: bool = False,
        rotary_length: int = 0,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal, rotary_length)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 4 * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        if self.checkpoint_activations and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._compute, features, use_reentrant=False)
            return recomputed
        return self._compute(features)

    def _compute(self, features: Tensor) -> Tensor:
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(features)))
        return features + added


class Attention(nn.Module):
    """Multi-head self-attention with a linear layer each for queries, keys, values and output.

    The number of heads is read off the projections, so that a rank that holds some of their columns computes
    that share of the heads.

    Shapes: (B, T, width) to the same.
    """

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, rotary_length: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.dropout = dropout
        self.causal = causal
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.rotary = Rotary(self.head_width, rotary_length) if rotary_length else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        q, k, v = (
            projection(features).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, heads here, T, head width)
            for projection in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(
            self.rotary(q), self.rotary(k), v, dropout_p=dropout, is_causal=self.causal
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Rotary(nn.Module):
    """Turns pairs of features by angles proportional to the position.

    The product of a query and a key then depends on their distance alone. The tables are kept rather than the
    frequencies, because low precision spoils large angles but not their sines.

    Shapes: (B, heads, T, W) with even W to the same.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, length: int, base: float = 10_000.0) -> None:
        super().__init__()
        pairs = torch.arange(head_width // 2, dtype=torch.float64)
        angle = torch.arange(length, dtype=torch.float64).outer(base ** (-2 * pairs / head_width))  # (length, W / 2)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class FeedForward(nn.Module):
    """Shapes: (B, T, width) to the same, through `hidden` features."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, features: Tensor) -> Tensor:
        down: Tensor = self.down(gelu(self.up(features), approximate="tanh"))
        return down


def initialize(net: nn.Module, width: int, depth: int) -> None:
    """Weights of deviation sqrt(2 / (5 * width)), biases of 0.

    The deviation is Nguyen & Salazar's "SmallInit", 2019, https://arxiv.org/abs/1910.05895: GPT-2's 0.02 at a width
    of 1000, and larger for narrow nets, which learn slowly from 0.02. What is added to the features of a token,
    twice in each block, is made smaller by sqrt(2 * depth), so that their size at the end does not depend on the
    depth: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    deviation = math.sqrt(2 / (5 * width))
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            added = name.endswith(("attention.out", "mlp.down"))
            nn.init.normal_(module.weight, std=deviation / math.sqrt(2 * depth) if added else deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def block_plan(blocks: nn.ModuleList, chain: tuple[str, ...]) -> ParallelPlan:
    """How a net splits its `Block`s, which it calls `blocks`: inside attention by heads, inside the MLP by features."""
    heads = [block.attention.heads for block in blocks if isinstance(block, Block)]
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
    return ParallelPlan(
        blocks=("blocks.*",),
        columns=tuple(f"blocks.*.{name}" for name in columns),
        rows=("blocks.*.attention.out", "blocks.*.mlp.down"),
        heads=heads[0] if heads else None,
        chain=chain,
    )


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"model.net.{name}={value} must be at least 1: type model.net.{name}=1 or more")


def check_heads(width: int, heads: int, even: bool = False) -> None:
    """Each head needs the same number of features; rotation in pairs, an even one."""
    unit = 2 * heads if even else heads
    if width % unit == 0:
        return
    widths = [size for size in (width // unit * unit, (width // unit + 1) * unit) if size]
    fitting = [count for count in range(1, width + 1) if width % (2 * count if even else count) == 0]
    advice = [f"model.net.width={size}" for size in widths]
    if fitting:
        advice.append(f"model.net.heads={min(fitting, key=lambda count: abs(count - heads))}")
    share = "an even number of features for each head" if even else "the same number of features for each head"
    raise ValueError(
        f"model.net.width={width} does not give model.net.heads={heads} heads {share}: type {' or '.join(advice)}"
    )


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"model.net.dropout={dropout} must be in [0, 1): type model.net.dropout=0")
