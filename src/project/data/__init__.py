"""LightningDataModules: which samples there are, and how ranks share them."""

from project.data.cifar import CIFAR10, CIFAR100
from project.data.datamodule import DataModule, TensorDataset
from project.data.digits import DigitsDataModule
from project.data.image_folder import ImageFolder
from project.data.images import ImageDataModule, ImageDataset
from project.data.mnist import MNIST, FashionMNIST
from project.data.sampler import EvaluationBatches, TrainBatches
from project.data.synthetic import SyntheticImages
from project.data.tabular import TabularDataModule
from project.data.text import TextDataModule

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "DataModule",
    "DigitsDataModule",
    "EvaluationBatches",
    "FashionMNIST",
    "ImageDataModule",
    "ImageDataset",
    "ImageFolder",
    "SyntheticImages",
    "TabularDataModule",
    "TensorDataset",
    "TextDataModule",
    "TrainBatches",
]
