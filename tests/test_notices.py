"""Notices are sentences; other warnings stay as they are."""

import warnings

import pytest

from project.notices import Notice, notice, show_notices_plainly


def test_a_notice_is_shown_as_it_stands_and_another_warning_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    show_notices_plainly()
    once = warnings.formatwarning
    show_notices_plainly()
    assert warnings.formatwarning is once
    assert warnings.formatwarning(Notice("No picture for val"), Notice, "here.py", 7) == "No picture for val\n"
    other = warnings.formatwarning(UserWarning("another"), UserWarning, "here.py", 7, line="x = 1")
    assert other == "here.py:7: UserWarning: another\n  x = 1\n"


def test_a_notice_can_be_caught_as_a_warning() -> None:
    with pytest.warns(Notice, match="told"):
        notice("told")
