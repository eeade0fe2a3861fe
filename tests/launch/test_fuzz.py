"""Whatever is typed gets a config or a sentence, in moments, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from project.config import combinations, preflight
from project.config.composition import check_choices, config_folder, explain, register_resolvers, walk
from project.config.from_checkpoint import compose_from_checkpoint
from project.config.unread_keys import check_added
from project.errors import sentence
from project.launch import job
from project.launch.resume import compose_resumed

register_resolvers()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", list(overrides))


FOLDER = config_folder()
KEYS = sorted(key for key in walk(composed()) if not key.startswith("paths."))
GROUPS = {
    str(folder.relative_to(FOLDER)): sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in FOLDER.rglob("*")
    if folder.is_dir() and folder.name not in ("hydra", "benchmark")
}
WORDS = ["null", "true", "-1", "0", "1", "2", "1e9", "-0.5", "nan", "inf", "auto", "[]", "[0,1]", "{}", "''", "???"]
WORDS += ["${seed}", "${nothing}", "${oc.env:NOTHING}", "a b", "'a", "1,2", "../..", "/", "x" * 300, "\x00", "é", "***"]

values = st.one_of(st.sampled_from(WORDS), st.integers().map(str), st.floats().map(str), st.text(max_size=12))
keyed = st.tuples(st.sampled_from(["", "+", "++", "~"]), st.sampled_from(KEYS), values).map(
    lambda parts: f"{parts[0]}{parts[1]}={parts[2]}" if parts[0] != "~" else f"~{parts[1]}"
)
chosen = st.sampled_from(sorted(GROUPS)).flatmap(
    lambda group: st.one_of(st.sampled_from(GROUPS[group] or ["none"]), values).map(lambda choice: f"{group}={choice}")
)
anything = st.text(max_size=20)


def told(error: Exception) -> str | None:
    """What the command line would say of an error; None where it would show a traceback."""
    return sentence(error) or explain(error, "train")


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.one_of(keyed, keyed, chosen, anything), min_size=1, max_size=4))
def test_overrides_get_a_config_or_a_sentence(overrides: list[str]) -> None:
    try:
        arguments = ["train", *overrides]
        compose_resumed("train", arguments)
        check_choices(arguments)
        read = composed(*arguments[1:])
        check_added(read, overrides, "train")
        config: dict[str, Any] = job._plain(read, overrides)
        preflight.check(config)
        combinations.check(config)
        preflight.check_batch_size(config, 2)
    except Exception as error:
        words = told(error)
        if words is None:
            raise AssertionError(f"{overrides} would end in a traceback") from error
        assert 0 < len(words) < 3000


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.sampled_from(["ckpt_path", "resume"]), st.one_of(values, anything), st.lists(keyed, max_size=2))
def test_paths_get_a_sentence(name: str, value: str, more: list[str]) -> None:
    arguments = ["train", f"{name}={value}", *more]
    try:
        (compose_resumed if name == "resume" else compose_from_checkpoint)("train", arguments)
    except Exception as error:
        if told(error) is None:
            raise AssertionError(f"{arguments} would end in a traceback") from error


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []
