"""The server that ranks are forked from imports this one module, and with it what every rank needs."""

from project.launch.imports import NEEDED_BY_RANKS, NEEDED_BY_TRAINING, import_for_good

import_for_good(*NEEDED_BY_RANKS, *NEEDED_BY_TRAINING)
