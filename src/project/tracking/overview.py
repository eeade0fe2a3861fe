"""What becomes of the windows that were gathered: who is late, what bounds the run, and all of it as one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from project.tracking import charts
from project.tracking.arrivals import Arrivals
from project.tracking.dashboard import Dashboard
from project.tracking.diagnosis import Diagnosis, diagnose
from project.tracking.lateness import lateness
from project.tracking.remedies import Facts
from project.tracking.windows import NUM_FIELDS, Ranks

PERSISTS = 5  # windows in a row until a straggler or a starving input is warned of ...
WORTH = 1.2  # ... if the run could be so many times as fast without
WARNED_OF = ("straggler", "input")
FEWEST_STEPS = 5  # to be judged


class Overview:
    """Kept by rank 0; 1,024 ranks take it some milliseconds a window.

    Args:
        warn: Is given a sentence once, where a straggler or a starving input persists.
        dashboard: Gets every window, if there is one.
        hosts: Of each rank.

    Attributes:
        ranks: The whole training as one window.
    """

    def __init__(
        self, warn: Callable[[str], None], dashboard: Dashboard | None = None, hosts: Sequence[str] = ()
    ) -> None:
        self.ranks: Ranks | None = None
        self.dashboard = dashboard
        self._warn = warn
        self._hosts = hosts
        self._has_warned = False
        self._bound: tuple[str, int | None] = ("", None)
        self._in_a_row = 0

    def add(
        self,
        step: int,
        rows: Tensor,
        came: Arrivals,
        facts: Facts,
        run: Callable[[Ranks], Mapping[str, float]] = lambda _: {},
        replicas_ms: Sequence[float] = (),
    ) -> Diagnosis:
        """Take in one window, and judge it.

        Args:
            step: As the loggers count.
            rows: A packed `Window` and packed `Arrivals` of each rank; (R, NUM_FIELDS + NUM_ARRIVALS).
            came: This rank's arrivals.
            facts: What is set.
            run: More curves of the run, from the window.
            replicas_ms: Of ``dp``, each replica's forward.
        """
        ranks = Ranks(rows[:, :NUM_FIELDS])
        known = came.of_all(rows[:, NUM_FIELDS:])
        if known is not None:
            ranks = ranks.with_columns({"late": lateness(*known) * ranks.step()})
        self.ranks = ranks if self.ranks is None else self.ranks.merged(ranks)
        diagnosis = diagnose(ranks, facts)
        bound = (diagnosis.bound, diagnosis.rank)
        self._in_a_row = self._in_a_row + 1 if bound == self._bound else 1
        self._bound = bound
        if self.dashboard is not None:
            values = dict(run(ranks))
            if len(ranks) > 1:
                values |= charts.of_straggler(diagnosis, self._in_a_row if diagnosis.bound == "straggler" else 0)
            self.dashboard.write(step, ranks, values, diagnosis.rank, replicas_ms)
        persists = self._in_a_row >= PERSISTS and diagnosis.bound in WARNED_OF
        if persists and diagnosis.gain >= WORTH and not self._has_warned:
            self._has_warned = True
            self._warn("\n".join(diagnosis.lines()))
            if self.dashboard is not None:
                self.dashboard.write_page("warning", step, diagnosis, ranks, self._hosts)
        return diagnosis

    def judge(self, step: int, facts: Facts) -> Diagnosis | None:
        """The verdict on the training until now, written with its pictures; None after too few steps."""
        if self.ranks is None or float(self.ranks["steps"].max()) < FEWEST_STEPS:
            return None
        diagnosis = diagnose(self.ranks, facts)
        if self.dashboard is not None:
            self.dashboard.write_page("diagnosis", step, diagnosis, self.ranks, self._hosts)
            if len(self.ranks) > 1:
                self.dashboard.write_pictures(step, self.ranks)
        return diagnosis
