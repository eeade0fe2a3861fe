"""How far a training is and how long it still takes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a training stands.

    Attributes:
        batches: Done, of all epochs, also those before a resume.
        steps: Of optimizers; several in a batch where there are several optimizers, one in several batches under
            accumulation.
        max_batches: At which the last epoch ends; infinite where that is not known.
        max_steps: At which training ends; infinite without.
    """

    batches: int
    steps: int
    max_batches: float = math.inf
    max_steps: float = math.inf

    def share(self) -> float:
        """What is done of all there is to do, 0 to 1; NaN where no end is known."""
        shares = [
            done / limit
            for done, limit in ((self.batches, self.max_batches), (self.steps, self.max_steps))
            if math.isfinite(limit) and limit > 0
        ]
        return min(1.0, max(shares)) if shares else math.nan

    def batches_left(self) -> float:
        """Until the first of both ends; infinite where none is known."""
        per_batch = self.steps / self.batches if self.batches else 1.0
        by_steps = (self.max_steps - self.steps) / per_batch if per_batch else math.inf
        return max(0.0, min(self.max_batches - self.batches, by_steps))

    def remaining_s(self, batch_s: float, validations_s: list[float], batches_measured: int) -> float:
        """Seconds until the end, NaN where none is known.

        Validations to come take as long as those before; the first, which warms up, is left out.

        Args:
            batch_s: Of training.
            validations_s: Of each validation since the start, or the resume.
            batches_measured: Trained since then.
        """
        left = self.batches_left()
        if not math.isfinite(left):
            return math.nan
        usual = validations_s[1:] or validations_s
        validation_s = sum(usual) / len(usual) if usual else 0.0
        return left * (batch_s + len(validations_s) / max(1, batches_measured) * validation_s)
