"""The digits as images that come one by one: what the template's batches are compared with."""

import torch

from project.benchmarking.pil_digits import MEAN, STD, PILDigits


def test_a_sample_is_its_image_scaled_and_standardized() -> None:
    images = torch.randint(256, (5, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    dataset = PILDigits(images, torch.arange(5))
    for index in range(5):
        image, label = dataset[index]
        torch.testing.assert_close(image, (images[index][None].float() / 255 - MEAN[0]) / STD[0])
        assert label == index
