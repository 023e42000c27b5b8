"""tristep.optim: what is refused, with torch's errors and nothing changed."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_peers import ARGUMENTS, all_data_of

import tristep

# By argument, what torch refuses in some class that has it.
WRONG: dict[str, list[Any]] = {
    "lr": [-0.1, torch.tensor([0.1, 0.2])],
    "betas": [(1.0, 0.0), (0.0, 1.0), (0.9, torch.tensor(0.99)), (torch.tensor(0.9), 0.99)],
    "eps": [-1e-8, (-1e-30, 1e-3)],
    "weight_decay": [-1.0],
    "momentum": [-0.5],
    "momentum_decay": [-0.2],
    "rho": [1.1],
    "alpha": [-0.1],
    "lr_decay": [-0.5],
    "initial_accumulator_value": [-1.0],
    "etas": [(1.0, 0.5)],
    "nesterov": [True],  # SGD's needs momentum
    "beta2_decay": [0.8],
    "d": [0.0],
    "adjust_lr_fn": ["arbitrary"],
}


def _parameter(shape=(2, 2), dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


WRONG_PARAMETERS = {
    "one twice": lambda: [_parameter()] * 2,
    "one in two groups": lambda: [{"params": one} for one in [_parameter()] * 2],
}


def _error_of(library, name, parameters=lambda: [_parameter()], **arguments):
    given = parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            optimizer = getattr(library, name)(given, **arguments)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        except (Exception, UserWarning) as error:
            return type(error)
    return None


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_torch_refuses_is_refused_with_an_error_of_its_type(name):
    known = {key: each.default for key, each in inspect.signature(getattr(torch.optim, name)).parameters.items()}
    cases: list[dict[str, Any]] = [{"no_such_argument": 1}]
    for key in WRONG.keys() & known.keys():
        cases += [{key: value} for value in WRONG[key] if isinstance(value, tuple) == isinstance(known[key], tuple)]
    cases += [{"parameters": make} for make in WRONG_PARAMETERS.values()]
    refused = {str(case): error for case in cases if (error := _error_of(torch.optim, name, **case))}
    assert len(refused) >= 5
    assert {str(case): _error_of(tristep.optim, name, **case) for case in cases if str(case) in refused} == refused


def test_a_step_that_one_group_makes_impossible_changes_nothing():
    """The groups have rules of their own, and the one that fails is the last."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = tristep.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "amsgrad": True}])
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = "fast"
    before = all_data_of(optimizer)
    with pytest.raises(TypeError, match="^lr of a group='fast': must be a number, not str"):
        optimizer.step()
    assert all_data_of(optimizer) == before


def test_a_sparse_parameter_is_refused_when_it_is_passed():
    """torch's SGD takes it, its other optimizers refuse it in the same words."""
    parameter = torch.nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"params\[0\] is sparse .*: SGD requires dense parameter tensors"):
        tristep.optim.SGD([parameter], lr=0.1)


def test_parameters_made_of_other_tensors_are_refused():
    """They have no memory that could be updated, other than the DTensors of a sharded model."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    parameter = torch.nn.Parameter(two_tensor.TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(TypeError, match="'shard' is a TwoTensor, .* use torch.optim"):
        tristep.optim.Adam([("shard", parameter)])
    with pytest.raises(TypeError, match="'0' is a TwoTensor: a Trainer takes plain parameters"):
        tristep.Trainer([parameter], "adam")


def test_states_of_another_model_are_refused_by_name():
    net, other = torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)
    optimizer, donor = (tristep.optim.Adam(module.named_parameters()) for module in (net, other))
    for module, each in ((net, optimizer), (other, donor)):
        module(torch.ones(1, module.in_features)).sum().backward()
        each.step()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    words = r"'exp_avg' of 'weight' has shape \(3, 3\), the parameter \(3, 2\)"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(donor.state_dict())
    optimizer.state[net.weight]["exp_avg"] = donor.state[other.weight]["exp_avg"]
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")  # torch's, before the error
def test_fake_tensors_are_named():
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = tristep.optim.Adam([parameter])
        parameter.grad = torch.ones(2)
        with pytest.raises(ValueError, match=r"params\[0\] has no memory: .* FakeTensorMode \(it is a FakeTensor\)"):
            optimizer.step()


def _flattened(optimizer):
    """Replace the parameters of the only group by one vector with a gradient, as DeepSpeed's ZeRO does."""
    (group,) = optimizer.param_groups
    vector = torch.cat([param.detach().flatten() for param in group["params"]]).requires_grad_()
    vector.grad = torch.ones_like(vector)
    group["params"] = [vector]
    return vector


@pytest.mark.parametrize(
    ("name", "options"),
    [("Muon", {}), ("SOAP", {}), ("Adafactor", {}), ("LAMB", {}), ("Lion", {"clip_norm": 1.0})],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_vector_in_place_of_whose_shapes_count_is_refused(name, options):
    optimizer = getattr(tristep.optim, name)([torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2)], lr=0.1, **options)
    vector = _flattened(optimizer)
    words = rf"2 parameters, as of shape \(3, 4\), were replaced by a vector of 24.*ZeRO.* {name} .*Use ZeRO stage 0"
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert torch.equal(vector, torch.ones(24))
    assert not optimizer.state


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_vector_for_one_of_several_optimizers_is_refused_before_another_steps(in_turns):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = tristep.optim.MultiOptimizer(net, [("ndim<2", "AdamW", {"lr": 0.1}), ("*", "Muon", {"lr": 0.1})])
    groups, vectors = optimizer.param_groups, []
    for group in groups:
        group["params"] = [torch.cat([param.detach().flatten() for param in group["params"]]).requires_grad_()]
        vectors += group["params"]
    before = [vector.detach().clone() for vector in vectors]
    for vector in vectors:
        vector.grad = torch.ones_like(vector)
    if in_turns:  # as DeepSpeed does, group by group
        optimizer.param_groups = groups[:1]
    with pytest.raises(ValueError, match="2 parameters, as of shape .*, were replaced by a vector of 20"):
        optimizer.step()
    assert all(map(torch.equal, vectors, before))
