"""The server that ranks are forked from imports this one module, and with it what every rank needs."""

from project.launch.imports import import_for_ranks

import_for_ranks()
