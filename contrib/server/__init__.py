"""The parameter server (dist_async): workers push gradients and pull weights, and do not wait for each other; it updates.

Of the processes that `torchrun` starts, the last one is the server. A worker sends it one message for all keys of a push or
pull.
"""

from .loop import serve
from .store import ServerStore, Staleness

__all__ = ["ServerStore", "Staleness", "serve"]
