"""Smaller models: weights that are set to zero, and weights of eight bits."""
