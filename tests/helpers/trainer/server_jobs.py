"""Jobs of a parameter server, for tests."""

import os
from unittest import mock

import torch
import torch.distributed as dist
from processes import module_at

from tristep import kvstore

SECONDS = 60  # until a process that is not heard of counts as lost


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
