"""LightningDataModules: which samples there are, and how ranks share them."""

from project.data.datamodule import DataModule, TensorDataset
from project.data.digits import DigitsDataModule
from project.data.sampler import EvaluationBatches, TrainBatches
from project.data.synthetic import SyntheticImages
from project.data.text import TextDataModule

__all__ = [
    "DataModule",
    "DigitsDataModule",
    "EvaluationBatches",
    "SyntheticImages",
    "TensorDataset",
    "TextDataModule",
    "TrainBatches",
]
