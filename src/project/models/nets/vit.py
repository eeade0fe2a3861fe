"""A small Vision Transformer, after Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from project.models.nets.gpt import Block, block_plan, check_dropout, check_heads, check_sizes, initialize
from project.models.plan import ParallelPlan


class ViT(nn.Module):
    """Square patches as tokens, `depth` blocks of attention over all of them, and a linear layer on their mean.

    Nothing in it depends on the other images of a batch, so its numbers don't depend on the ranks.

    Shapes: (B, C, H, W) to logits (B, num_classes).

    Args:
        image_shape: (channels, height, width).
        num_classes: Number of labels.
        patch: Side of a patch in pixels; divides height and width.
        width: Features of a patch.
        depth: Number of blocks.
        heads: Attention heads of a block; each has width / heads features.
        dropout: Share of the features, and of the attention weights, that is dropped in training.

    Raises:
        ValueError: A size is out of range, `patch` does not divide the image, or `heads` not `width`.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        patch: int = 4,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(image_shape) != 3:
            raise ValueError(
                f"model.net.image_shape={list(image_shape)} must be channels, height and width: "
                "type model.net.image_shape=[1,8,8]"
            )
        check_sizes(num_classes=num_classes, patch=patch, width=width, depth=depth, heads=heads)
        check_heads(width, heads)
        check_dropout(dropout)
        channels, image_height, image_width = image_shape
        if image_height % patch or image_width % patch:
            sides = range(1, min(image_height, image_width) + 1)
            fitting = [side for side in sides if image_height % side == 0 and image_width % side == 0]
            raise ValueError(
                f"model.net.patch={patch} does not divide images of {image_height}x{image_width} pixels: "
                f"type model.net.patch={min(fitting, key=lambda side: abs(side - patch))}"
            )
        num_patches = (image_height // patch) * (image_width // patch)
        self.embedding = PatchEmbedding(channels, patch, num_patches, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.pool = MeanOfTokens()
        self.head = nn.Linear(width, num_classes)
        initialize(self, width, depth)

    @property
    def parallel_plan(self) -> ParallelPlan:
        return block_plan(self.blocks, chain=("embedding", "blocks.*", "norm", "pool", "head"))

    def forward(self, image: Tensor) -> Tensor:
        features = self.embedding(image)
        for block in self.blocks:
            features = block(features)
        logits: Tensor = self.head(self.pool(self.norm(features)))
        return logits


class PatchEmbedding(nn.Module):
    """A vector for each square patch, and one for its place.

    Shapes: (B, C, H, W) to (B, num_patches, width).
    """

    def __init__(self, channels: int, patch: int, num_patches: int, width: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(num_patches, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.positions, std=math.sqrt(2 / (5 * width)))

    def forward(self, image: Tensor) -> Tensor:
        features = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        dropped: Tensor = self.dropout(features)
        return dropped


class MeanOfTokens(nn.Module):
    """Shapes: (B, T, width) to (B, width)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.mean(dim=1)
