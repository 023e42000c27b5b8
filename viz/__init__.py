"""Pictures and widgets of a training run.

Imports ``tristep.trainer`` and ``tristep.kernels``; nothing imports it.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.viz'; import it by that name (imported as {__name__!r})")
