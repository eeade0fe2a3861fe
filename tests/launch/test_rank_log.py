"""What a rank logs, and what the console shows of it."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from project.launch.rank_log import Tee, rank_log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(*texts: str) -> str:
    """What arrives in the log of what is written to the console, which gets all of it."""
    console, log = Terminal(), io.StringIO()
    tee = Tee(console, log)
    for text in texts:
        assert tee.write(text) == len(text)
    if hasattr(tee, "finish"):  # as rank_log does at the end
        tee.finish()
    assert console.getvalue() == "".join(texts)
    return log.getvalue()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["a\n"], "a\n"),
        (["a", "b", "\n", "c\nd\n"], "ab\nc\nd\n"),
        (["one\n\ntwo\n"], "one\n\ntwo\n"),
        (["windows\r\n"], "windows\n"),
        (["  indented\n"], "  indented\n"),
    ],
)
def test_whole_lines_reach_the_log_as_they_are(written: list[str], expected: str) -> None:
    assert logged(*written) == expected


def test_colours_do_not_reach_the_log() -> None:
    assert logged("\x1b[1;31merror\x1b[0m: \x1b[38;5;9mred\x1b[39m\n") == "error: red\n"


def test_of_a_progress_bar_only_the_last_drawing_reaches_the_log() -> None:
    redrawn = [f"\rEpoch 0: {percent}%|" for percent in range(0, 101, 10)]
    assert logged("begin\n", *redrawn, "\n", "end\n") == "begin\nEpoch 0: 100%|\nend\n"


def test_a_bar_that_erases_itself_leaves_nothing_in_the_log() -> None:
    assert logged("\rSanity: 50%", "\r           \r", "\n") in ("", "\n")


UP = "\r\x1b[2K\x1b[1A\x1b[2K"  # as rich begins to draw a bar of two lines again


def test_of_a_bar_of_several_lines_only_the_first_and_the_last_drawing_reach_the_log() -> None:
    # Lightning's bars for an epoch and its validation.
    drawings = [f"{UP if step else ''}Epoch 0 {step}/9\nValidation {step}/9" for step in range(10)]
    log = logged("begin\n", *drawings, "\n", "end\n")
    assert log == "begin\nEpoch 0 0/9\nEpoch 0 9/9\nValidation 9/9\nend\n"


def test_a_line_printed_above_a_bar_of_several_lines_reaches_the_log() -> None:
    bar = "Epoch 1/9\nValidation 1/9"
    log = logged(bar, f"{UP}{bar}", f"{UP}printed\n{bar}", f"{UP}{bar}", f"{UP}{bar}", "\n")
    assert log.splitlines().count("printed") == 1
    assert log.splitlines().count("Epoch 1/9") == 3  # the first, the one below what is printed, and the last


def test_the_console_answers_for_the_tee() -> None:
    assert Tee(Terminal(), io.StringIO()).isatty()
    assert not Tee(io.StringIO(), io.StringIO()).isatty()
    assert Tee(sys.__stdout__, io.StringIO()).encoding == sys.__stdout__.encoding  # type: ignore[arg-type,union-attr]


def test_what_is_written_as_a_list_of_lines_reaches_the_log() -> None:
    tee = Tee(io.StringIO(), log := io.StringIO())
    tee.writelines(["a\n", "b\n"])
    if hasattr(tee, "finish"):
        tee.finish()
    assert log.getvalue() == "a\nb\n"


def test_rank_0_is_seen_on_the_console_and_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with rank_log(tmp_path, 0, own_console=True):
        print("out")
        print("err", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("out\n", "err\n")
    assert (tmp_path / "ranks" / "rank_0.log").read_text() == "out\nerr\n"


def test_a_line_without_an_end_reaches_the_log_at_the_end(tmp_path: Path) -> None:
    with rank_log(tmp_path, 0, own_console=True):
        print("no end of line", end="")
    assert (tmp_path / "ranks" / "rank_0.log").read_text().rstrip("\n") == "no end of line"


def test_an_error_of_rank_0_is_in_its_log_with_its_traceback(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(RuntimeError, match="boom"), rank_log(tmp_path, 0, own_console=True):
        raise RuntimeError("boom")
    assert (sys.stdout, sys.stderr) == before
    log = (tmp_path / "ranks" / "rank_0.log").read_text()
    assert log.startswith("Traceback")
    assert log.endswith("RuntimeError: boom\n")


def test_a_log_is_continued_not_begun_anew(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with rank_log(tmp_path, 0, own_console=True):
            print(text)
    assert (tmp_path / "ranks" / "rank_0.log").read_text() == "first\nsecond\n"


@pytest.mark.parametrize("tell_errors", [True, False])
def test_other_ranks_are_in_their_log_alone_but_for_errors_if_told(tmp_path: Path, tell_errors: bool) -> None:
    # In a process of its own, because its file descriptors are turned over for good; without Lightning, whose
    # import takes seconds.
    code = f"""
import os
from pathlib import Path
from project.launch import rank_log
rank_log.quiet_libraries = lambda: None
with rank_log.rank_log(Path({str(tmp_path)!r}), 1, own_console=False, tell_errors={tell_errors}):
    print('by Python')
    os.system('echo by another program')
    raise RuntimeError('boom')
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.stderr.startswith("rank 1 failed:\nTraceback") == tell_errors
    log = (tmp_path / "ranks" / "rank_1.log").read_text()
    assert log.startswith("by Python\nby another program\nTraceback")
    assert log.count("RuntimeError: boom") >= 1
