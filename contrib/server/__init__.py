"""The parameter server (dist_async): workers push gradients and pull weights without waiting for each other, servers update.

Of the processes that `torchrun` starts, the last TRISTEP_NUM_SERVERS (default 1) are servers. Each keeps some of the keys,
and a part of each large array. A worker sends each server one message for all keys that it pushes or pulls at once.
"""

from .loop import serve
from .store import ServerStore, Staleness
from .updaters import register_updater

__all__ = ["ServerStore", "Staleness", "register_updater", "serve"]
