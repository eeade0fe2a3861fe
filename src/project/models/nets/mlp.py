"""A multilayer perceptron over the pixels of an image."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from project.models.plan import ParallelPlan


class MLP(nn.Module):
    """Flattened pixels through `depth` hidden layers of `width` units.

    Shapes: (B, C, H, W) to logits (B, num_classes).

    Raises:
        ValueError: A size is below 1, or `dropout` is not in [0, 1).
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: int = 256,
        depth: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in {"width": width, "depth": depth, "num_classes": num_classes}.items():
            if value < 1:
                raise ValueError(f"model.net.{name}={value} must be at least 1: type model.net.{name}=1 or more")
        if not 0 <= dropout < 1:
            raise ValueError(f"model.net.dropout={dropout} must be in [0, 1): type model.net.dropout=0")
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = math.prod(image_shape)
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), nn.GELU(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, num_classes))

    @property
    def parallel_plan(self) -> ParallelPlan:
        """Pairs of linear layers, the first split by columns and the second by rows; an odd last one stays whole."""
        linear = [f"layers.{i}" for i, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        paired = linear[: len(linear) // 2 * 2]
        return ParallelPlan(
            blocks=tuple(linear), columns=tuple(paired[::2]), rows=tuple(paired[1::2]), chain=("layers.*",)
        )

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.layers(image)
        return logits
