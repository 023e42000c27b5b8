"""The ring of measured steps: what it keeps, and that reading from a GPU never waits."""

import threading

import numpy as np
import pytest
import torch
from simulated_gpus import SimulatedGpus
from torch.utils._python_dispatch import TorchDispatchMode

from tristep.kernels import MetricsBuffer, metrics, streams


def values(into):
    return into.values(into.arrived(wait=True))


class Event:
    """One of torch.cuda, which is over when the test says so."""

    pending: tuple = ()

    def __init__(self, device):
        self.over = False
        Event.pending += (self,)

    def query(self):
        return self.over

    def synchronize(self):
        for event in Event.pending:  # those before it are over, too
            event.over = True
            if event is self:
                return


@pytest.fixture
def gpu_like(monkeypatch):
    """Rings of 4 slots apart from the host's memory, copied to it by copies that are over when the test says so."""
    monkeypatch.setattr(streams, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(streams, "record_event", Event)
    monkeypatch.setattr(streams, "pinned", torch.empty)
    monkeypatch.setattr(metrics, "SLOTS", 4)
    monkeypatch.setattr(Event, "pending", ())


def write(into, number):
    into.begin_step()
    into.ring(torch.device("cpu"))[into.slot] = float(number)
    into.mark(np.array([0]))
    assert into.end_step()


def test_the_ring_keeps_the_last_steps():
    into = MetricsBuffer(metrics.weight_square, 2, size=3)
    assert values(into).shape == (0, 2, 1)
    for k in range(8):
        write(into, k)
        steps = into.arrived()
        assert (steps.start, steps.stop) == (max(k - 2, 0), k + 1)
        assert into.values(steps)[:, 0, 0].tolist() == list(steps)
        assert np.isnan(into.values(steps)[:, 1]).all()


def test_a_step_that_writes_nothing_or_breaks_off_takes_no_slot():
    into = MetricsBuffer(metrics.weight_square, 1, size=3)
    into.begin_step()
    assert not into.end_step()
    into.ring(torch.device("cpu"))
    into.mark(np.array([0]))  # and breaks off
    into.begin_step()
    assert not into.end_step()
    assert into.count == 0


def test_while_a_step_is_written_those_before_can_be_read():
    into = MetricsBuffer(metrics.weight_square, 1, size=3)
    for k in range(5):
        write(into, k)
    into.begin_step()
    into.ring(torch.device("cpu"))[into.slot] = 99.0
    into.mark(np.array([0]))
    assert values(into)[:, 0, 0].tolist() == [2, 3, 4]


def test_reading_gives_what_has_arrived_and_never_waits(gpu_like):
    into = MetricsBuffer(metrics.weight_square, 1, size=10)
    for k in range(4):
        write(into, k)
    assert len(Event.pending) == 2  # a copy for every two steps
    assert len(into.arrived()) == 0
    Event.pending[0].over = True
    assert into.arrived() == range(2)
    write(into, 4)
    assert into.arrived() == range(2)
    assert len(Event.pending) == 3  # which reading began
    Event.pending[1].over = Event.pending[2].over = True
    assert into.arrived() == range(5)
    assert values(into)[:, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_copies_go_round(gpu_like):
    """Of 4 slots and of 6 places, in every phase; while the copy that takes an old place is under way, it is not read."""
    into = MetricsBuffer(metrics.weight_square, 1, size=5)
    for k in range(40):
        write(into, k)
        steps = into.arrived(wait=k % 3 == 0)
        if k % 3 == 0:
            assert steps == range(max(k - 4, 0), k + 1)
        assert into.values(steps)[:, 0, 0].tolist() == list(steps)
        assert len(steps) <= 5
    for k in range(40, 60):  # nothing arrives any more
        write(into, k)
    assert list(into.arrived()) == []
    assert values(into)[:, 0, 0].tolist() == [55, 56, 57, 58, 59]


def test_weights_may_move_between_steps(gpu_like):
    into = MetricsBuffer(metrics.weight_square, 1, size=5)
    for k in range(3):
        write(into, k)
    into._move(torch.device("cpu"))
    write(into, 3)
    assert values(into)[:, 0, 0].tolist() == [0, 1, 2, 3]
    into.mark(np.array([0]))
    with pytest.raises(ValueError, match=r"share a metrics buffer with others on another device"):
        into.ring(torch.device("meta"))


class Copies(TorchDispatchMode):
    """Notes the current stream of each copy out of a ring."""

    def __init__(self, device):
        super().__init__()
        self.device, self.streams = device, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket is torch.ops.aten.copy_:
            self.streams.append(torch.cuda.current_stream(self.device))
        return operation(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a real GPU none is simulated")
def test_who_reads_on_another_stream_reads_behind_the_steps():
    """The reader may be another thread, with another current stream."""
    device = torch.device("cuda:1")
    with SimulatedGpus(), Copies(device) as copies:
        into, side = MetricsBuffer(metrics.weight_square, 1, size=8), torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            for _ in range(2):
                into.begin_step()
                into.ring(device)
                into.mark(np.array([0]))
                assert into.end_step()
        read = threading.Thread(target=lambda: into.arrived(wait=True))
        assert into.arrived(wait=True) == range(2)
        assert copies.streams
        assert all(stream is side for stream in copies.streams)
        read.start()
        read.join()
