"""The parameter server (dist_async): workers push gradients and pull weights without waiting for each other; servers update.

Of the processes that `torchrun` starts, the last TRISTEP_NUM_SERVERS (default 1) are servers. Each server stores some of the
keys, and a shard of each large array. A worker sends each server one message for all keys of a push or pull.
"""

from .loop import serve
from .store import ServerStore, Staleness
from .updaters import register_updater

__all__ = ["ServerStore", "Staleness", "register_updater", "serve"]
