"""Plain torch modules: a tensor in, a tensor out, no training logic."""

from project.models.nets.mlp import MLP
from project.models.nets.residual_cnn import ResidualCNN

__all__ = ["MLP", "ResidualCNN"]
