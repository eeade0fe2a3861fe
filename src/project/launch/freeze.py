"""The fork server imports this last: what it has imported is no garbage, and its copies need not look for any in it.

A full collection in a copy would walk half a million objects, and so copy the pages that they lie on.
"""

import gc

gc.freeze()
