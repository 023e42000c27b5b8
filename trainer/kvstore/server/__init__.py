"""The parameter server (dist_async): workers push gradients and pull weights without waiting for each other, servers update.

Of the processes that `torchrun` starts, the last TRISTEP_NUM_SERVERS (default 1) are servers. Each keeps some of the keys,
and a part of each large array. A worker sends each server one message for all keys that it pushes or pulls at once.
"""

from __future__ import annotations

import sys

from ...validation import choice
from ..base import ASYNCHRONOUS
from .compression import compressor_of
from .job import Roles
from .loop import ServerLoop
from .store import ServerStore, ServerSync, Staleness, open_stores

__all__ = ["ServerStore", "ServerSync", "Staleness", "compressor_of", "connect", "serve"]

_TIMEOUT = 1800.0  # seconds; torch's own default for gloo


def connect(name: str = "dist_async", timeout: float = _TIMEOUT) -> ServerStore:
    """The store of this name, in a worker. A server serves until all workers have closed theirs, and then ends the process.

    All processes must call it. The processes are those of torch.distributed's default process group, which is made from
    `torchrun`'s environment if there is none.

    Args:
        name: "dist_async" keeps values on the servers' CPUs, "dist_device_async" on their GPUs where they have any.
        timeout: seconds after which a process that has not been heard of counts as lost, > 0. One that ends is noticed at
            once.

    Raises:
        ValueError: fewer processes than servers and one worker, or TRISTEP_NUM_SERVERS is no integer >= 1.
        RuntimeError: the environment says nothing of other processes.

    Source: MXNet 1.9.1, `mx.kv.create`, and `kvstore_server.py`, which ends a server's process in the same way.
    """
    name = choice("name", name, ASYNCHRONOUS, ignore_case=True)
    if open_stores:
        raise RuntimeError(
            f"{open_stores[0]!r} is open: servers serve one store at a time; use it again, or close() it first"
        )
    roles = Roles.of_this_job(timeout)
    if roles.rank >= roles.workers:
        ServerLoop(roles, name).run()
        sys.exit(0)
    return ServerStore(roles, name)


def serve(name: str = "dist_async", timeout: float = _TIMEOUT) -> None:
    """Be a server until all workers have closed their stores. To be called where they call `connect`; as that otherwise.

    Raises:
        ValueError, RuntimeError: as `connect`; or this process is no server.
        TimeoutError: a worker has not been heard of for too long.
    """
    name, roles = choice("name", name, ASYNCHRONOUS, ignore_case=True), Roles.of_this_job(timeout)
    if roles.rank < roles.workers:
        roles.leave()
        raise RuntimeError(
            f"rank {roles.rank} is a worker: of {roles.workers + roles.servers} processes the last {roles.servers} "
            "(TRISTEP_NUM_SERVERS) serve; call connect() here"
        )
    ServerLoop(roles, name).run()
