"""The cost model, under the name that it had before it moved to `tristep.contrib`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("tristep.contrib.cost_model")
