"""Nets map images to logits, whatever the image's shape."""

from typing import Any

import pytest
import torch
from torch import nn

from project.models.nets import MLP, ResidualCNN


@pytest.mark.parametrize("net", [MLP, ResidualCNN])
@pytest.mark.parametrize("image_shape", [(1, 8, 8), (3, 32, 32), (5, 7, 9), (1, 1, 1)])
def test_images_of_any_shape_give_a_logit_per_class_and_reach_every_weight(
    net: type[nn.Module], image_shape: tuple[int, int, int]
) -> None:
    module = net(image_shape, num_classes=4)
    logits = module(torch.randn(3, *image_shape))
    assert logits.shape == (3, 4)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(("blocks", "channels"), [(1, 8), (2, 16), (3, 32), (6, 32)])
def test_cnn_stops_widening_when_the_image_is_small(blocks: int, channels: int) -> None:
    net = ResidualCNN((1, 8, 8), num_classes=4, width=8, blocks=blocks)
    assert net.head.in_features == channels


def test_mlp_has_the_asked_depth_and_width() -> None:
    layers = [layer for layer in MLP((1, 8, 8), 10, width=32, depth=3).modules() if isinstance(layer, nn.Linear)]
    assert [layer.in_features for layer in layers] == [64, 32, 32, 32]


@pytest.mark.parametrize(
    ("net", "arguments"),
    [
        (MLP, {"width": 0}),
        (MLP, {"depth": 0}),
        (MLP, {"dropout": 1.0}),
        (ResidualCNN, {"width": 0}),
        (ResidualCNN, {"blocks": 0}),
        (ResidualCNN, {"image_shape": (8, 8)}),
    ],
)
def test_impossible_sizes_are_refused_by_name(net: type[nn.Module], arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"model.net.{next(iter(arguments))}="):
        net(**{"image_shape": (1, 8, 8), "num_classes": 10} | arguments)
