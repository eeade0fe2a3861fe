"""LightningModules, the nets they train and how they are optimized."""

from project.models.image_classifier import ImageClassifier
from project.models.language_model import LanguageModel
from project.models.tabular import Regressor, TabularClassifier  # example

__all__ = [
    "ImageClassifier",
    "LanguageModel",
    "Regressor",  # example
    "TabularClassifier",  # example
]
