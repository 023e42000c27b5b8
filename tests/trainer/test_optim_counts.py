"""Step counts beyond 2^24, the end of float32 integers: they end only where torch's own do. The judge is torch.optim."""

import copy

import pytest
import torch

import tristep
from tristep.trainer.optimizer import Adam as GluonAdam

END = 2**24
NAMES = [name for name in tristep.optim.__all__ if hasattr(torch.optim, name) and name not in ("SGD", "Muon")]  # no counts
OURS = ["Lion", "LAMB", "ScheduleFreeAdamW", "SparseAdam"]
COUNTS = {
    "float32": torch.tensor(END - 1.0),
    "float64": torch.tensor(END - 1.0, dtype=torch.float64),
    "int64": torch.tensor(END - 1),
    "int32": torch.tensor(END - 1, dtype=torch.int32),
    "a number": END - 1,
}


def _stepped(optimizer, steps=1):
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.linspace(-1.0, 1.0, parameter.numel(), dtype=parameter.dtype).view_as(parameter)
                parameter.grad = gradient.to_sparse() if "Sparse" in type(optimizer).__name__ else gradient
        optimizer.step()
    return optimizer


def _made(library, name, **arguments):
    return _stepped(getattr(library, name)([torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)], **arguments))


def _loaded(optimizer, *counts):
    saved = optimizer.state_dict()
    for row, count in zip(saved["state"].values(), counts, strict=True):
        row["step"] = copy.deepcopy(count)
    optimizer.load_state_dict(saved)
    return optimizer


def _counts(optimizer):
    """The counts as saved, with their types."""
    counts = [row["step"] for row in optimizer.state_dict()["state"].values()]
    return [(str(getattr(count, "dtype", type(count))), float(count)) for count in counts]


def _check_as_torchs(name, kind, at_end, **arguments):
    found = []
    for library in (torch.optim, tristep.optim):
        optimizer = _loaded(_made(library, name, **arguments), COUNTS[kind], COUNTS[kind])
        loaded = _counts(optimizer)
        found.append((loaded, _counts(_stepped(optimizer, 3))))
    assert found[0] == found[1]
    assert {count for _, count in found[1][1]} == {at_end}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "SparseAdam"])
def test_loaded_counts_go_on_as_torchs(name, kind):
    _check_as_torchs(name, kind, END if kind in ("float32", "a number") else END + 2)


def test_counts_of_16_bits_do_not_end_where_torchs_do():
    ours, theirs = (
        _counts(_stepped(_loaded(_made(library, "Adam"), *[torch.tensor(2048.0, dtype=torch.float16)] * 2), 3))
        for library in (tristep.optim, torch.optim)
    )
    assert ours == [("torch.float32", 2051.0)] * 2
    assert theirs == [("torch.float16", 2048.0)] * 2


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("name", OURS)
def test_counts_that_torch_does_not_have_in_float32_do_not_end(name, kind):
    optimizer = _stepped(_loaded(_made(tristep.optim, name), COUNTS[kind], COUNTS[kind]), 3)
    assert [count for _, count in _counts(optimizer)] == [END + 2] * 2


def test_a_count_that_random_rounding_depends_on_does_not_end():
    """Otherwise each step from 2^24 on would round by the same random numbers."""
    optimizer = _made(tristep.optim, "Adam", state_dtype="8bit")
    assert _counts(_stepped(_loaded(optimizer, *[COUNTS["float32"]] * 2), 3)) == [("torch.float64", END + 2)] * 2


def test_counts_of_a_trainer(tmp_path):
    """They are integers in the trainer and in its files."""
    net = torch.nn.Linear(3, 2)

    def step(trainer):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.step(1)

    trainer = tristep.Trainer(net, GluonAdam(begin_num_update=END))
    step(trainer)
    trainer.save_states(tmp_path / "states")
    trainer = tristep.Trainer(net, "adam")
    trainer.load_states(tmp_path / "states")
    step(trainer)
    assert trainer.state_dict()["counts"] == {"weight": END + 2, "bias": END + 2}
    assert trainer.optimizer.num_update == END + 2
