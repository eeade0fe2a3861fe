"""Folders of small pictures to train on: classes that a net can tell apart."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 200), "green": (40, 190, 70), "red": (210, 50, 50)}


def picture(colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (20, 16)) -> Image.Image:
    """Noise around a colour; `size` is (width, height)."""
    noise = np.random.default_rng(seed).normal(0, 25, (size[1], size[0], 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def folder_of_pictures(folder: Path, per_class: int = 20) -> Path:
    """`folder/<class>/<number>.png`, of different sizes."""
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            size = (16 + number % 3 * 7, 16 + number % 2 * 9)
            picture(colour, number, size).save(folder / name / f"{number:03d}.png")
    return folder
