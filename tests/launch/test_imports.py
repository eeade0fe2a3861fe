"""Imports without a search for garbage, among which none is looked for later either."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from project.launch.imports import import_for_good


@pytest.fixture
def thawed() -> None:  # type: ignore[misc]
    yield  # type: ignore[misc]
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_as_before_whatever_happens(
    collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thawed: None
) -> None:
    (tmp_path / f"looks_{collects}.py").write_text("import gc\ncollects = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    (gc.enable if collects else gc.disable)()
    import_for_good(f"looks_{collects}")
    assert not sys.modules[f"looks_{collects}"].collects
    assert gc.isenabled() == collects
    assert gc.get_freeze_count() > 10_000
    with pytest.raises(ImportError):
        import_for_good("no_such_module")
    assert gc.isenabled() == collects


def test_what_came_after_the_import_is_not_frozen_when_it_is_asked_for_again(thawed: None) -> None:
    gc.unfreeze()
    import_for_good("json", "sys")
    assert gc.get_freeze_count() == 0


SERVER = """
import sys, types
import project.launch.imports as imports
imports.WITHOUT_TORCH = ("colorsys",)
imports.NEEDED_BY_RANKS = ("fractions", "decimal")
imports.NEEDED_BY_TRAINING = ("chunk",)
import project.launch.fork_server
import gc
assert gc.isenabled() and gc.get_freeze_count() > 1000
assert {"colorsys", "fractions", "decimal", "chunk"} <= sys.modules.keys()
assert "torch" not in sys.modules
import os
assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
"""


def test_the_fork_server_has_imported_what_ranks_need_and_freezes_it() -> None:
    subprocess.run([sys.executable, "-c", SERVER], check=True, timeout=60)


@pytest.mark.slow
def test_the_server_that_ranks_are_forked_from_does_not_touch_cuda() -> None:
    """A process that has counted the devices through CUDA has copies that can't use them."""
    code = """
import torch
touched = []
for module, names in ((torch.cuda, "is_available device_count init _lazy_init"), (torch.accelerator, "is_available")):
    for name in names.split():
        setattr(module, name, lambda *_, name=name: touched.append(name) or False)
import project.launch.fork_server
print(touched)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
