"""A template for multi-device deep-learning experiments with PyTorch Lightning, Hydra and TensorBoard."""
