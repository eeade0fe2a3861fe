"""Tokens, keys and passwords stay out of everything that is written down."""

import pytest

from project.config.secrets import check_unmasked, is_secret, masked, masked_arguments, unmasked
from project.errors import UserError


@pytest.mark.parametrize("name", ["api_key", "apiKey", "token", "HF_TOKEN", "password", "db-password", "client_secret"])
def test_secret_names_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["tokenizer", "num_tokens", "keyboard", "monkey", "lr", "keys", "secretary"])
def test_other_names_are_not(name: str) -> None:
    assert not is_secret(name)


CONFIG = {"logger": {"api_key": "abc", "run": 3}, "data": {"tokenizer": "bytes", "token": None, "key": 7, "seq": ["a"]}}


def test_only_texts_of_secret_names_are_hidden() -> None:
    hidden = masked(CONFIG)
    assert hidden["logger"] == {"api_key": "***", "run": 3}
    assert hidden["data"] == CONFIG["data"]
    assert CONFIG["logger"]["api_key"] == "abc"  # type: ignore[index]


def test_secrets_come_back_from_who_has_them_and_are_asked_for_otherwise() -> None:
    assert unmasked(masked(CONFIG), CONFIG) == CONFIG
    check_unmasked(CONFIG, "the run's config")
    with pytest.raises(UserError, match=r"logger\.api_key was not written .*: type logger\.api_key=VALUE"):
        check_unmasked(masked(CONFIG), "the run's config")


def test_command_line_is_written_without_them() -> None:
    typed = [
        "python",
        "-m",
        "project.train",
        "logger.api_key=abc",
        "--token",
        "abc",
        "seed=1",
        "+x.password=a=b",
        "key=",
    ]
    shown = [
        "python",
        "-m",
        "project.train",
        "logger.api_key=***",
        "--token",
        "***",
        "seed=1",
        "+x.password=***",
        "key=",
    ]
    assert masked_arguments(typed) == shown
