"""Jobs of a parameter server, for tests."""

import os
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from processes import module_at

from tristep import kvstore, optimizer
from tristep.contrib.server.core import ServerCore

SECONDS = 60  # until a process that is not heard of counts as lost


def core_of(values, name=None, workers=2, **settings):
    core = ServerCore(workers)
    core.init(values)
    if name is not None:
        core.use(optimizer.create(name, **settings))
    return core


def pulled(core, worker, keys):
    outs = [torch.full_like(core.values[key], float("nan")) for key in keys]
    core.pull(worker, keys, outs)
    return outs


# The delayed quadratic: f(w) = sum of a w^2 / 2, and eight workers in turn, each with the weights of eight updates ago.
CURVATURES, WORKERS = np.linspace(0.25, 1.0, 4), 8


def job(path, name, *args):
    """A worker's part of a test, the function of this name in this file; or the server. What it returns, on all ranks."""
    function = getattr(module_at(path), name)  # the server, too, must know what the file registers
    with mock.patch.dict(os.environ, {"TRISTEP_ENGINE": "eager"}):
        if dist.get_rank() == dist.get_world_size() - 1:
            return kvstore.serve(timeout=SECONDS)
        store = kvstore.create("dist_async", timeout=SECONDS)
        try:
            return function(store, *args)
        finally:
            store.close()


def pulled_value(store, key, like):
    out = torch.full_like(like, float("nan"))
    store.pull(key, out)
    return out
