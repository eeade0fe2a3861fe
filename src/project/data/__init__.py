"""LightningDataModules: which samples there are, and how ranks share them."""

from project.data.cifar import CIFAR10, CIFAR100  # example
from project.data.datamodule import DataModule, TensorDataset
from project.data.digits import DigitsDataModule
from project.data.image_folder import ImageFolder  # example
from project.data.images import ImageDataModule, ImageDataset
from project.data.mnist import MNIST, FashionMNIST  # example
from project.data.sampler import EvaluationBatches, TrainBatches
from project.data.synthetic import SyntheticImages
from project.data.tabular import TabularDataModule  # example
from project.data.text import TextDataModule  # example

__all__ = [
    "CIFAR10",  # example
    "CIFAR100",  # example
    "MNIST",  # example
    "DataModule",
    "DigitsDataModule",
    "EvaluationBatches",
    "FashionMNIST",  # example
    "ImageDataModule",
    "ImageDataset",
    "ImageFolder",  # example
    "SyntheticImages",
    "TabularDataModule",  # example
    "TensorDataset",
    "TextDataModule",  # example
    "TrainBatches",
]
