"""A process that trains alone is not ended where somebody takes the time to look."""

import bdb
import sys
import types
from collections.abc import Callable

import pytest

from project.launch.watchdog import _is_debugged


def in_module(name: str, function: Callable[[], bool]) -> bool:
    """What a function returns that is called from a module of this name."""
    module = types.ModuleType(name)
    exec("def call(function): return function()", module.__dict__)
    result: bool = module.call(function)
    return result


def test_a_training_at_the_prompt_of_a_debugger_is_being_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pydevd", raising=False)
    assert not _is_debugged()
    assert not in_module("other", _is_debugged)
    assert in_module(bdb.__name__, _is_debugged)
    monkeypatch.setitem(sys.modules, "pydevd", types.ModuleType("pydevd"))
    assert _is_debugged()
