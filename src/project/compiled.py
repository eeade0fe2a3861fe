"""Whether a module is compiled, for all that a compiled one stands in the way of, or that advises it."""

from __future__ import annotations

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked to trace the module, in place or wrapped."""
    # By its name: to import the class takes seconds.
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
