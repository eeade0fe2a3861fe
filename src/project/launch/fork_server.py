"""The server that ranks are forked from imports this one module, and with it what every rank needs."""

import signal

from project.cpu import CoresTaken, choose_waiting
from project.launch.imports import (
    NEEDED_BY_RANKS,
    NEEDED_BY_TRAINING,
    WITHOUT_TORCH,
    import_for_good,
)
from project.launch.parent import end_with_parent

before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to answer

end_with_parent()
# A server that was started ahead of the command's own look at the cores takes one itself, while it imports what is
# long and knows no threads.
since = CoresTaken.until_now(with_parent=True)
import_for_good(*WITHOUT_TORCH)
choose_waiting(since, with_parent=True)
import_for_good(*NEEDED_BY_RANKS, *NEEDED_BY_TRAINING)
signal.signal(signal.SIGINT, before)
