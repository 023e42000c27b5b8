"""Tensors of one launch that share memory, which threads would change at the same time: refused, with both names."""

import pytest
import torch

import tristep
from tristep import rule
from tristep.kernels import Update


@rule
def averaged(w, g, state, hyper):
    (mean,) = state
    (lr,) = hyper
    mean = 0.5 * mean + g
    return w - lr * mean, (mean,)


def tensors(device):
    """Two weights, states and gradients, all apart."""
    return {f"{what}{k}": torch.full((6, 8), 1.0 + k, device=device) for what in "wsg" for k in range(2)}


def update_of(made, engine):
    run = Update(averaged, [made["w0"], made["w1"]], [(made["s0"],), (made["s1"],)], None, engine, names=["a", "b"])
    run.hyper[:] = [1.0, 0.5]
    run.bind([made["g0"], made["g1"]])
    return run


SHARED = {
    "weights": ("w1", "w0", "a and b share"),
    "states": ("s1", "s0", "mean of a and mean of b share"),
    "state and weight": ("s0", "w0", "a and mean of a share"),
    "gradient and other weight": ("g0", "w1", "b and the gradient of a share"),
    "gradient and state": ("g0", "s1", "mean of b and the gradient of a share"),
}


@pytest.mark.parametrize("what", SHARED)
def test_shared_memory_is_refused(what, engine, device):
    made = tensors(device)
    place, other, words = SHARED[what]
    made[place] = made[other]
    before = {name: tensor.clone() for name, tensor in made.items()}
    with pytest.raises(ValueError, match=words):
        update_of(made, engine)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.items())


@pytest.mark.parametrize("columns", [False, True])
def test_parts_of_one_tensor_must_not_overlap(columns, engine, device):
    base, made = torch.ones(12, 16, device=device), tensors(device)
    made["w0"], made["w1"] = (
        (base[:6, :8], base[:6, 4:12]) if columns else (base.view(-1)[:48].view(6, 8), base[2:5].view(6, 8))
    )
    with pytest.raises(ValueError, match="a and b share"):
        update_of(made, engine)
    if columns:
        made["w1"] = base[:6, 8:]
        update_of(made, engine)()
        assert torch.equal(base[:6, :8].cpu(), torch.full((6, 8), 1 - 0.5 * (0.5 * 1 + 1)))
        assert torch.equal(base[:6, 8:].cpu(), torch.full((6, 8), 1 - 0.5 * (0.5 * 2 + 2)))


def test_gradients_may_be_shared_or_be_the_weight(engine, device):
    made = tensors(device)
    made["g0"] = made["g1"]
    update_of(made, engine)()
    assert torch.equal(made["w0"].cpu(), torch.full((6, 8), 1 - 0.5 * (0.5 * 1 + 2)))
    made = tensors(device)
    made["g0"] = made["w0"]
    update_of(made, engine)()
    assert torch.equal(made["w0"].cpu(), torch.full((6, 8), 1 - 0.5 * (0.5 * 1 + 1)))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("face", ["Trainer", "optim"])
def test_parameters_tied_by_their_data_are_refused(face, late, device):
    a, b = (torch.nn.Linear(3, 3, device=device) for _ in range(2))
    named = {"a": a.weight, "b": b.weight}

    def stepped(made=None):
        if made is None and face == "Trainer":
            made = tristep.Trainer(named, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        made = tristep.optim.SGD(named.items(), lr=0.1, momentum=0.9) if made is None else made
        for param in named.values():
            param.grad = torch.ones_like(param)
        made.step(*([1] if face == "Trainer" else []))
        return made

    made = stepped() if late else None
    b.weight.data = a.weight.data
    before = a.weight.detach().clone()
    with pytest.raises(ValueError, match="share memory"):
        stepped(made)
    assert torch.equal(a.weight, before)
