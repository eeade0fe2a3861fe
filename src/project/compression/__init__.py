"""Smaller models: weights that are set to zero, and weights of eight bits."""

KINDS = ("int8_dynamic", "int8_weight_only")  # of quantization
