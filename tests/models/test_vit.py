"""The Vision Transformer: shapes, independence of images, and what it learns."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from project.data import DigitsDataModule
from project.models import ImageClassifier
from project.models.nets import ViT
from project.models.nets.gpt import Block


@pytest.mark.parametrize(("image_shape", "patch"), [((1, 8, 8), 2), ((3, 32, 32), 8), ((5, 6, 9), 3), ((1, 1, 1), 1)])
def test_images_of_any_shape_give_a_logit_per_class_and_reach_every_weight(
    image_shape: tuple[int, int, int], patch: int
) -> None:
    net = ViT(image_shape, num_classes=4, patch=patch, width=16, depth=2)
    logits = net(torch.randn(3, *image_shape))
    assert logits.shape == (3, 4)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_logits_of_an_image_do_not_depend_on_the_others_of_the_batch() -> None:
    net, images = ViT((1, 8, 8), 10).train(), torch.randn(5, 1, 8, 8)
    assert torch.allclose(net(images)[:1], net(images[:1]), atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())


def test_all_patches_are_seen_and_their_places_matter() -> None:
    net = ViT((1, 8, 8), 10)
    image = torch.randn(1, 1, 8, 8, requires_grad=True)
    net(image).square().sum().backward()
    assert image.grad is not None
    assert image.grad.abs().min() > 0
    assert not torch.allclose(net(image), net(image.flip(-1)), atol=1e-5)


def test_blocks_are_those_of_the_language_model_in_a_list() -> None:
    net = ViT((1, 8, 8), 10, depth=3)
    assert [type(block) for block in net.blocks] == [Block] * 3


@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = {
        "_target_": "project.models.nets.ViT",
        "image_shape": [1, 8, 8],
        "num_classes": 10,
        "patch": 2,
        "width": 32,
        "depth": 2,
    }
    model = ImageClassifier(net, {"_target_": "torch.optim.AdamW", "lr": 3e-3})
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        limit_val_batches=0,
    )
    datamodule = DigitsDataModule(batch_size=64)
    trainer.fit(model, datamodule=datamodule)
    (metrics,) = trainer.test(model, datamodule=datamodule, verbose=False)
    assert metrics["test/accuracy"] > 0.85


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"patch": 3}, "model.net.patch=3 does not divide images of 8x8 pixels: type model.net.patch=2"),
        ({"patch": 0}, "model.net.patch=0 must be at least 1"),
        ({"image_shape": (8, 8)}, r"model.net.image_shape=\[8, 8\] must be channels, height and width"),
        ({"heads": 5}, "type model.net.width=60 or model.net.width=65 or model.net.heads=4$"),
        ({"num_classes": 0}, "model.net.num_classes=0 must be at least 1"),
        ({"dropout": -0.1}, "model.net.dropout=-0.1 must be in"),
    ],
)
def test_impossible_arguments_are_refused_with_the_nearest(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        ViT(**{"image_shape": (1, 8, 8), "num_classes": 10} | arguments)
