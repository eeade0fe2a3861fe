"""Plain torch modules: a tensor in, a tensor out, no training logic."""

from project.models.nets.gpt import GPT
from project.models.nets.mlp import MLP
from project.models.nets.residual_cnn import ResidualCNN
from project.models.nets.vit import ViT

__all__ = ["GPT", "MLP", "ResidualCNN", "ViT"]
