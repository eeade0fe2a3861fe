"""What a console can show."""

import io
import sys


def spare_encoding() -> None:
    """Let a character that the console can't show be a question mark, and no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def shows(text: str) -> bool:
    """Whether the console can show these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
