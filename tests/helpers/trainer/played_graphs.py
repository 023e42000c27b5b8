"""CUDA graphs without a GPU: a played one notes operations and launches, and replays these and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tristep.trainer.loops import batch_step
from tristep.trainer.step import capture as capture_module

HAS_GPU = torch.cuda.is_available()


class PlayedGraph(TorchDispatchMode):
    """A CUDA graph on the CPU."""

    recording = None
    made = 0

    def warm_up(self, run):
        return run()

    def record(self, run):
        self.played = []
        PlayedGraph.recording = self
        PlayedGraph.made += 1
        try:
            with self:
                return run()
        finally:
            PlayedGraph.recording = None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, operation._schema
        if schema.is_mutable:  # whose result is what it changes
            self.played.append((operation, args, kwargs, None))
            changed = [a for a, given in zip(schema.arguments, args, strict=False) if a.alias_info is not None]
            if len(schema.returns) != 1:
                assert not schema.returns
                return None
            return kwargs["out"] if "out" in kwargs else args[[a.name for a in schema.arguments].index(changed[0].name)]
        result = operation(*args, **kwargs)
        if not any(each.alias_info is not None for each in schema.returns):  # no view
            self.played.append((operation, args, kwargs, result))
        return result

    def replay(self):
        for operation, args, kwargs, result in self.played:
            found = operation(*args, **kwargs)
            if result is not None:
                for old, new in zip(_pytree.tree_leaves(result), _pytree.tree_leaves(found), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


@contextmanager
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a GPU let captured steps be played inside this context, with the kernels in Triton's interpreter."""
    PlayedGraph.made = 0
    if not HAS_GPU:
        from tristep.kernels.backends.triton import launch

        call = launch.KernelCall.__call__

        def noted(self):
            if PlayedGraph.recording is None:
                call(self)
            else:
                PlayedGraph.recording.played.append((call, (self,), {}, None))

        monkeypatch.setattr(launch.KernelCall, "__call__", noted)
        for module in (capture_module, batch_step):
            monkeypatch.setattr(module, "has_graphs", lambda device: True)
        monkeypatch.setattr(capture_module, "_new_graph", PlayedGraph)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with np.errstate(all="ignore"):  # Triton's interpreter computes in NumPy, which would warn of infinities
        yield
