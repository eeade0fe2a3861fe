"""A small residual network, after He et al. 2016, https://arxiv.org/abs/1512.03385."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

from project.models.plan import ParallelPlan


class ResidualCNN(nn.Module):
    """A convolution, `blocks` residual blocks, the mean over all positions and a linear layer.

    Each block after the first halves the resolution and doubles the channels, as long as both sides are at
    least 4 pixels.

    Shapes: (B, C, H, W) to logits (B, num_classes).

    Raises:
        ValueError: A size is below 1, or `image_shape` is not (channels, height, width).
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        if len(image_shape) != 3:
            raise ValueError(
                f"model.net.image_shape={list(image_shape)} must be channels, height and width: "
                "type model.net.image_shape=[1,8,8]"
            )
        for name, value in {"width": width, "blocks": blocks, "num_classes": num_classes}.items():
            if value < 1:
                raise ValueError(f"model.net.{name}={value} must be at least 1: type model.net.{name}=1 or more")
        channels, least_side = image_shape[0], min(image_shape[1:])
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        body = [ResidualBlock(width, width)]
        for _ in range(blocks - 1):
            if least_side >= 4:
                body.append(ResidualBlock(width, 2 * width, stride=2))
                width, least_side = 2 * width, (least_side + 1) // 2
            else:
                body.append(ResidualBlock(width, width))
        self.body = nn.Sequential(*body)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, num_classes)

    @property
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("body.*",), chain=("stem", "body.*", "pool", "head"))

    def forward(self, image: Tensor) -> Tensor:
        features = self.body(self.stem(image))
        logits: Tensor = self.head(self.pool(features))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes.

    Shapes: (B, inputs, H, W) to (B, outputs, H / stride, W / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, features: Tensor) -> Tensor:
        return relu(self.shortcut(features) + self.residual(features))
