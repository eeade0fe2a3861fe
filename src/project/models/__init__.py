"""LightningModules, the nets they train and how they are optimized."""

from project.models.image_classifier import ImageClassifier

__all__ = ["ImageClassifier"]
