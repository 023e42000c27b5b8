"""`state_dtype` of torch's own classes in `tristep.optim`; the judges are torch.optim and the same option of `as_torch`."""

import copy

import pytest
import torch

import tristep

F32, BF16, U8, I8 = torch.float32, torch.bfloat16, torch.uint8, torch.int8
SHAPES = ((64, 80), (7,), (41, 100))
MEANS = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in SHAPES]
CASES = {
    "SGD": ({"momentum": 0.9, "weight_decay": 0.1}, ("momentum_buffer",)),
    "Adam": ({"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq")),
    "AdamW": ({"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
}
STORED = {"float32": (F32, (64, 80)), "bfloat16": (BF16, (64, 80)), "8bit": (U8, (5280,)), "4bit": (I8, (2720,))}


def parameters(device="cpu", dtype=F32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def train(optimizer, steps=5, seed=1):
    """Train with gradients that persist, with noise in them."""
    torch.manual_seed(seed)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for _ in range(steps):
        for param, mean in zip(params, MEANS, strict=True):
            param.grad = (mean + 0.3 * torch.randn(param.shape)).to(param)
        optimizer.step()
    return params


def made(name, params=None, library=tristep.optim, **options):
    return getattr(library, name)(parameters() if params is None else params, lr=0.01, **CASES[name][0], **options)


@pytest.mark.cover("name", "state_dtype")
@pytest.mark.parametrize("state_dtype", STORED)
@pytest.mark.parametrize("name", CASES)
def test_states_are_stored_so_and_steps_stay_near_torchs(name, state_dtype, device):
    ours, theirs = parameters(device), parameters(device)
    optimizer = made(name, ours, state_dtype=state_dtype)
    train(optimizer)
    train(made(name, theirs, torch.optim))
    dtype, shape = STORED[state_dtype]
    for key in CASES[name][1]:
        assert (optimizer.state[ours[0]][key].dtype, tuple(optimizer.state[ours[0]][key].shape)) == (dtype, shape)
        assert optimizer.state[ours[1]][key].dtype == (BF16 if dtype == BF16 else F32)
    start = parameters(device)
    moved, apart = (
        sum(float((a - b).detach().square().sum()) for a, b in zip(theirs, others, strict=True)) for others in (start, ours)
    )
    assert apart <= {"float32": 1e-10, "bfloat16": 1e-4, "8bit": 1e-2, "4bit": 0.2}[state_dtype] * moved


@pytest.mark.parametrize("state_dtype", ["bfloat16", "8bit", "4bit"])
def test_steps_are_those_of_the_same_option_elsewhere(state_dtype, device):
    adamw = tristep.optim.as_torch(tristep.optimizer.AdamW)
    # Gluon's AdamW corrects neither the rate of the decay nor epsilon.
    others = train(adamw(parameters(device), lr=0.01, epsilon=0.0, state_dtype=state_dtype))
    ours = train(tristep.optim.AdamW(parameters(device), lr=0.01, eps=0.0, weight_decay=0.0, state_dtype=state_dtype))
    torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-6)


def test_every_group_may_have_its_own():
    params = parameters()
    groups = [{"params": params[:1], "state_dtype": "bfloat16"}, {"params": params[1:]}]
    optimizer = tristep.optim.AdamW(groups, state_dtype="8bit")
    assert [group["state_dtype"] for group in optimizer.param_groups] == ["bfloat16", "8bit"]
    train(optimizer, 1)
    assert [optimizer.state[param]["exp_avg"].dtype for param in params] == [BF16, F32, U8]
    with pytest.raises(ValueError, match="state_dtype='3bit': Did you mean '8bit' or '4bit'"):
        optimizer.add_param_group({"params": parameters(), "state_dtype": "3bit"})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": parameters()})
    assert optimizer.param_groups[2]["state_dtype"] == "8bit"


@pytest.mark.parametrize("state_dtype", ["bfloat16", "8bit", "4bit"])
@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_to_the_bit(name, state_dtype):
    optimizer = made(name, state_dtype=state_dtype)
    params = train(optimizer)
    again = made(name, [torch.nn.Parameter(param.detach().clone()) for param in params])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.param_groups[0]["state_dtype"] == state_dtype, "as all options of groups, it is that of the file"
    assert all(map(torch.equal, train(again, seed=2), train(optimizer, seed=2)))


@pytest.mark.parametrize("state_dtype", ["bfloat16", "8bit", "4bit"])
@pytest.mark.parametrize("name", CASES)
def test_torchs_states_are_converted(name, state_dtype):
    theirs = made(name, library=torch.optim)
    train(theirs)
    ours = made(name, state_dtype=state_dtype)
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(saved)
    assert saved["param_groups"] == theirs.state_dict()["param_groups"], "what is loaded stays as it is"
    assert ours.param_groups[0]["state_dtype"] == state_dtype
    train(ours, 1)
    dtype, _ = STORED[state_dtype]
    first = ours.param_groups[0]["params"][0]
    assert all(ours.state[first][key].dtype == dtype for key in CASES[name][1])


def test_rows_of_sparse_gradients_share_no_scales():
    table = torch.nn.Embedding(100, 64, sparse=True)
    groups = [{"params": table.parameters(), "state_dtype": "8bit"}]
    optimizer = tristep.optim.SparseAdam(groups)
    table(torch.tensor([1, 5])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(ValueError, match="whose gradient is sparse: rows share scales"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    assert not optimizer.state
