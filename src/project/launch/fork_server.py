"""The server that ranks are forked from imports this one module, and with it what every rank needs.

What it has imported is no garbage, and its copies need not look for any in it: a full collection in a copy would walk
half a million objects, and so copy the pages that they lie on.
"""

import gc

from project.launch.imports import import_for_ranks

import_for_ranks()
gc.freeze()
