"""The GPT: what a token sees, where it stands, how weights are shared, and how the net is split."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from project.models.nets import GPT
from project.models.nets.gpt import Attention, Block, Rotary


def gpt(**arguments: Any) -> GPT:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"vocab_size": 50, "context": 16, "width": 32, "depth": 3, "heads": 4}
    return GPT(**defaults | arguments)


def some_tokens(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


def parameter_gradients(net: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)  # of the dropout
    cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_token_changes_its_own_logits_and_later_ones_only(positions: str) -> None:
    net, tokens = gpt(positions=positions), some_tokens()
    changed = tokens.clone()
    changed[:, 9] += 1
    difference = (net(tokens) - net(changed % 50)).abs().amax(dim=(0, 2))
    assert difference[:9].max() < 1e-6
    assert difference[9:].min() > 1e-4


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_order_of_the_earlier_tokens_matters(positions: str) -> None:
    net, tokens = gpt(positions=positions).double(), torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert (net(tokens) - net(swapped))[:, -1].abs().max() > 1e-6


def test_product_of_turned_vectors_depends_on_their_distance_alone() -> None:
    rotary = Rotary(head_width=8, length=32).double()
    query, key = torch.randn(2, 8, dtype=torch.float64)
    turned_queries, turned_keys = rotary(query.expand(1, 1, 32, 8))[0, 0], rotary(key.expand(1, 1, 32, 8))[0, 0]
    products = turned_queries @ turned_keys.T  # (query position, key position)
    for distance in range(-31, 32):
        diagonal = products.diagonal(distance)
        assert diagonal.max() - diagonal.min() < 1e-5  # the tables are float32
    assert len({round(value, 6) for value in products[0].tolist()}) == 32
    assert torch.allclose(turned_queries.norm(dim=1), query.norm().expand(32))


def test_tied_head_is_the_very_matrix_of_the_embedding() -> None:
    tied, untied = gpt(), gpt(tie_weights=False)
    assert tied.head.weight is tied.embedding.tokens.weight
    sizes = [sum(parameter.numel() for parameter in net.parameters()) for net in (tied, untied)]
    assert sizes[1] - sizes[0] == 50 * 32
    assert list(tied.state_dict()) == list(untied.state_dict())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_activations_give_the_same_gradients(dropout: float) -> None:
    tokens = some_tokens()
    plain = parameter_gradients(gpt(dropout=dropout), tokens)
    checkpointed = parameter_gradients(gpt(dropout=dropout, checkpoint_activations=True), tokens)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


@pytest.mark.parametrize("arguments", [{}, {"tie_weights": False}, {"positions": "learned"}, {"depth": 12}])
def test_untrained_net_finds_all_tokens_about_equally_likely(arguments: dict[str, Any]) -> None:
    net, tokens = gpt(**arguments), some_tokens(batch=32)
    loss = cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(50) + 0.2, abs=0.1)  # logits of variance 0.4 cost 0.2


def test_size_of_the_features_hardly_grows_with_the_depth() -> None:
    def growth(depth: int) -> float:
        net = gpt(depth=depth)
        before = after = torch.randn(1, 16, 32)
        for block in net.blocks:
            after = block(after)
        return (after.std() / before.std()).item()

    assert growth(24) == pytest.approx(growth(2), rel=0.1)


def test_every_weight_is_reached_by_the_gradient() -> None:
    for positions in ("rotary", "learned"):
        net = gpt(positions=positions, tie_weights=False)
        assert parameter_gradients(net, some_tokens()).keys() == dict(net.named_parameters()).keys()


def test_net_learns_a_short_text_by_heart() -> None:
    net = gpt(vocab_size=256, context=32)
    text = torch.tensor([list(b"to be, or not to be: that is the ")])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(60):
        loss = cross_entropy(net(text[:, :-1])[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_attention_split_by_columns_and_rows_adds_up() -> None:
    whole = Attention(width=32, heads=4, dropout=0.0, causal=True, rotary_length=16)
    x = torch.randn(2, 16, 32)
    parts = []
    for columns in (slice(0, 8), slice(8, 32)):  # one head, and three
        part = copy.deepcopy(whole)
        for name in ("q", "k", "v"):
            part.get_submodule(name).weight = nn.Parameter(whole.get_submodule(name).weight[columns])  # type: ignore[index]
        part.out.weight = nn.Parameter(whole.out.weight[:, columns])
        parts.append(part(x))
    assert torch.allclose(parts[0] + parts[1], whole(x), atol=1e-6)


def test_low_precision_keeps_the_positions_apart() -> None:
    exact, low = Rotary(16, 1024), Rotary(16, 1024).to(torch.bfloat16)
    x = torch.ones(1, 1, 1024, 16)
    assert (exact(x) - low(x.to(torch.bfloat16)).float()).abs().max() < 0.02


def test_dropout_is_for_training_only() -> None:
    net, tokens = gpt(dropout=0.5), some_tokens()
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))


def test_block_without_causality_sees_all_tokens() -> None:
    x = torch.randn(1, 5, 32)
    changed = x.clone()
    changed[:, 4] += torch.randn(32)
    block = Block(width=32, heads=4)
    assert (block(x) - block(changed))[:, 0].abs().max() > 1e-5


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"width": 100, "heads": 3, "positions": "learned"}, "type model.net.width=99 or model.net.width=102 or"),
        ({"width": 100, "heads": 3, "positions": "learned"}, "model.net.heads=2$"),
        ({"width": 36, "heads": 4}, "an even number .* model.net.width=32 or model.net.width=40 or model.net.heads=3$"),
        ({"width": 3, "heads": 4, "positions": "learned"}, "type model.net.width=4 or model.net.heads=3$"),
        ({"width": 1, "heads": 1}, "type model.net.width=2$"),
        ({"depth": 0}, "model.net.depth=0 must be at least 1"),
        ({"vocab_size": 0}, "model.net.vocab_size=0 must be at least 1"),
        ({"dropout": 1.0}, "model.net.dropout=1.0 must be in"),
        ({"positions": "sinus"}, "type model.net.positions=rotary or model.net.positions=learned"),
    ],
)
def test_impossible_arguments_are_refused_with_the_nearest(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        gpt(**arguments)


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 17 tokens, more than model.net.context=16"):
        gpt()(some_tokens(length=17))
