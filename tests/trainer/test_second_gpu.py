"""What works on tensors of a GPU other than the current one does it there: graphs, events, link measurement, kernels.

There need be no GPU: torch's fake tensors say that they are on `cuda:1`, and `torch.cuda` is played.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tristep
from tristep.trainer import capture, cost_model
from tristep.trainer.sync.agreement import RankAgreement
from tristep.trainer.sync.compressed import choose_compression

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """The played current device, as `torch.cuda.device` sets it; events note on the stream of which they are recorded."""
    state = SimpleNamespace(device=torch.device("cuda", 0), recorded=[])

    @contextmanager
    def device(wanted):
        before, state.device = state.device, torch.device(wanted)
        try:
            yield
        finally:
            state.device = before

    class Event:
        def record(self, stream=None):
            state.recorded.append(state.device if stream is None else stream)

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: state.device if of is None else torch.device(of))
    return state


@pytest.mark.skipif(torch.cuda.is_available(), reason="the triton engine then takes no tensors of the CPU")
def test_a_graph_is_made_recorded_and_replayed_on_the_parameters_device(current, monkeypatch):
    pytest.importorskip("tristep.kernels.backends.triton.launch", reason="Triton has builds for Linux only")
    seen = []

    class Graph:
        def __init__(self):
            seen.append(("made", current.device))

        def warm_up(self, run):
            seen.append(("warm-up", current.device))
            return run()

        def record(self, run):
            seen.append(("recorded", current.device))
            return run()

        def replay(self):
            seen.append(("replayed", current.device))

    monkeypatch.setattr(capture, "_new_graph", Graph)
    parameter = torch.nn.Parameter(torch.ones(3))
    trainer = tristep.Trainer([parameter], "sgd", {"learning_rate": 0.5}, engine="triton")

    def train():
        parameter.grad = torch.ones(3)
        trainer.step(1)

    step = capture.CapturedStep(train, SECOND, warmup=2)
    for _ in range(4):
        step()
    assert {what for what, _ in seen} == {"made", "warm-up", "recorded", "replayed"}
    assert {device for _, device in seen} == {SECOND}
    assert current.device.index == 0


class Operations(TorchDispatchMode):
    """Notes the devices of what torch's operations get and give."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.seen.append((operation.overloadpacket.__name__, kwargs or {}))
        return result


def test_counts_are_copied_without_waiting_and_the_event_is_of_their_device(current, monkeypatch):
    """The one copy is that to the host, into pinned memory: one from there, of what is not pinned, would be waited for."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **others: empty(*sizes, **others))
    parameters = [torch.nn.Parameter(torch.ones(2), requires_grad=trained) for trained in (True, False, True)]
    with FakeTensorMode():
        counts, sums = torch.ones(3, device=SECOND), torch.ones(2, device=SECOND)
        agreement = RankAgreement(None, 2, ["a", "b", "c"], parameters, None)
        with Operations() as operations:
            found = agreement.counts([True, False, True], counts, sums, False)
    assert found == [2, 2, 2]
    assert current.recorded == [SECOND]
    names = [name for name, _ in operations.seen]
    assert names.count("copy_") == 1
    assert "_to_copy" not in names


@pytest.mark.parametrize(("late", "missing"), [([2.0, 0.0, 2.0], None), ([2.0, 0.0, 1.0], "'c'")])
def test_late_counts_tell_of_missing_gradients_of_what_is_trained(late, missing):
    parameters = [torch.nn.Parameter(torch.ones(2), requires_grad=trained) for trained in (True, False, True)]
    agreement = RankAgreement(None, 2, ["a", "b", "c"], parameters, None)
    agreement._late = (
        torch.tensor(late + [0.0] * 4),
        SimpleNamespace(synchronize=lambda: None),
        torch.tensor([True, False, True]),
    )
    counts, sums = torch.tensor([2.0, 2.0, 2.0]), torch.zeros(4)

    def step():
        return agreement.counts([True, False, True], counts, sums, False)

    if missing is None:
        assert step() == [2, 2, 2]
    else:
        with pytest.raises(RuntimeError, match=f"another rank had no fresh gradient for {missing}: "):
            step()


def test_the_link_is_measured_from_the_parameters_device(current, monkeypatch):
    found = []

    def measure_link(group):
        found.append(current.device)
        raise InterruptedError

    monkeypatch.setattr(cost_model, "measure_link", measure_link)
    with FakeTensorMode():
        params = [torch.ones(2, device=SECOND)]
    with pytest.raises(InterruptedError):
        choose_compression(params, None)
    assert found == [SECOND]


def test_a_symmetric_product_is_launched_on_its_device(current, monkeypatch):
    symmetric = pytest.importorskip("tristep.kernels.backends.triton.symmetric", reason="Triton has builds for Linux only")
    found = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: found.append(current.device)

    monkeypatch.setattr(symmetric, "symmetric_kernel", Kernel())
    monkeypatch.setattr(symmetric, "block_pairs", lambda n, device: torch.zeros(n, 2))
    with FakeTensorMode():
        symmetric.symmetric_product(torch.ones(1, 4, 4, dtype=torch.bfloat16, device=SECOND))
    assert found == [SECOND]
