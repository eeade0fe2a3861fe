"""Optuna's grid, for a search that asks for its trials itself."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState


class GridSampler(optuna.samplers.GridSampler):
    """Leaves it to the search to stop after the last combination: Optuna's own can only stop ``Study.optimize``."""

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing."""
