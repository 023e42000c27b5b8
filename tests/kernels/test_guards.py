"""Guards: each change of a tensor that matters to a step is noticed, and nothing else is."""

import copy
import gc
import sys
import weakref
from collections import defaultdict

import pytest
import torch

from tristep.kernels import guards
from tristep.kernels.guards import GradGuard, GradLayouts, MemberGuard, PointerGuard, gradient_references

NAMES = ["a", "b", "c"]
pytestmark = pytest.mark.usefixtures("passes")


@pytest.fixture
def parameters():
    """Parameters with gradients."""
    parameters = [torch.nn.Parameter(torch.ones(n, n)) for n in (1, 2, 3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _write(parameters):
    for parameter in parameters:
        parameter.grad.add_(1)


MOVES = {
    "other memory": lambda tensor: setattr(tensor, "data", tensor.detach().clone()),
    "transposed in place": lambda tensor: tensor.t_(),
    "transposed through data": lambda tensor: setattr(tensor, "data", tensor.detach().t()),
    "cut through data": lambda tensor: setattr(tensor, "data", tensor.detach()[:1]),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "swapped for a sparse tensor": lambda tensor: torch.utils.swap_tensors(tensor, torch.ones(2, 2).to_sparse()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_tensor_that_moved_is_noticed(move):
    for i in range(3):
        tensors = [torch.ones(2, 2) for _ in range(3)]
        guard = PointerGuard(tensors)
        assert not guard.passes(tensors[1:])
        assert not guard.passes([None, *tensors[1:]])
        tensors[i].add_(1)
        assert guard.passes(tensors)
        MOVES[move](tensors[i])
        assert not guard.passes(tensors), i


def test_other_members_of_lists_and_dictionaries_are_noticed():
    def containers():
        return [["a", "b"], []], [{1: "c", 2: "d"}, defaultdict(dict, e={})]

    changes = [
        lambda lists, dicts: lists[0].append("a"),
        lambda lists, dicts: lists[1].append("b"),
        lambda lists, dicts: lists[0].pop(),
        lambda lists, dicts: lists[0].reverse(),
        lambda lists, dicts: dicts[0].update({1: "d"}),
        lambda lists, dicts: dicts[0].pop(2),
        lambda lists, dicts: dicts[1].update(e={}),  # an equal one
        lambda lists, dicts: dicts[1].update(f="e"),
    ]
    for i, change in enumerate(changes):
        lists, dicts = containers()
        guard = MemberGuard(lists, dicts)
        assert guard.passes()
        assert guard.passes()
        change(lists, dicts)
        assert not guard.passes(), i


def test_a_copy_of_a_guard_works(parameters):
    tensors = [torch.ones(2, 2) for _ in range(3)]
    original = PointerGuard(tensors)
    assert original.passes(tensors)
    guard = copy.deepcopy(original)
    del original
    assert guard.passes(tensors)
    tensors[1] = torch.ones(2, 2)
    assert not guard.passes(tensors)


def test_gradients_that_were_written_since_are_collected(parameters):
    guard = GradGuard(parameters, NAMES)
    gradients, versions = guard.collect_written()
    assert all(gradient is parameter.grad for gradient, parameter in zip(gradients, parameters, strict=True))
    guard.use(gradients, versions, list(map(weakref.ref, gradients)))
    assert guard.collect_written() is None
    _write(parameters)
    assert list(guard.collect_written()[1]) == [version + 1 for version in versions]
    assert guard.written(gradients) == [True] * 3
    guard.use(gradients)
    assert guard.written(gradients) == [False] * 3


@pytest.mark.parametrize("i", [0, 1, 2])
def test_a_gradient_that_is_not_written_missing_or_frozen_is_noticed(parameters, i):
    guard = GradGuard(parameters, NAMES)
    guard.use(guard.collect())
    _write(parameters[:i] + parameters[i + 1 :])
    assert guard.collect_written() is None
    assert guard.written(guard.collect()) == [k != i for k in range(3)]
    _write(parameters)
    parameters[i].requires_grad_(False)
    assert guard.collect_written() is None
    assert guard.written(guard.collect()) == [k != i for k in range(3)]
    parameters[i].requires_grad_(True)
    assert guard.collect_written() is not None
    parameters[i].grad = None
    assert guard.collect_written() is None
    assert guard.written(guard.collect()) == [k != i for k in range(3)]


@pytest.mark.parametrize("i", [0, 1, 2])
def test_another_tensor_of_the_same_version_is_written(parameters, i):
    guard = GradGuard(parameters, NAMES)
    guard.use(guard.collect())
    version = parameters[i].grad._version
    _write(parameters[:i] + parameters[i + 1 :])
    parameters[i].grad = torch.ones_like(parameters[i])
    torch.autograd.graph.increment_version([parameters[i].grad] * version)
    assert parameters[i].grad._version == version
    assert guard.collect_written() is not None


def test_passes_keep_no_references(parameters):
    gradients = [parameter.grad for parameter in parameters]
    guard, pointers, layouts = GradGuard(parameters, NAMES), PointerGuard(parameters), GradLayouts(gradients, True)
    row = {"a": parameters[0]}
    members = MemberGuard([parameters], [row])
    things = [None, True, torch.Tensor, torch.nn.Parameter, row, *parameters, *gradients]

    def look():
        for sparse in (False, True):  # which ends a pass early
            written, versions = guard.collect_written()
            guard.use(written, versions, gradient_references(written))
            assert guard.collect_written() is None
            assert pointers.passes(parameters)
            assert members.passes()
            present = [*written[:2], written[2].to_sparse() if sparse else None]
            assert (layouts.pointers(present, True, [True, True, sparse]) is None) == sparse
            assert layouts.pointers(written, True) is not None
            _write(parameters)

    look()
    before = list(map(sys.getrefcount, things))
    for _ in range(200):
        look()
    # Others use None and True, too.
    assert all(abs(a - b) < 100 for a, b in zip(map(sys.getrefcount, things), before, strict=True))


def test_an_inference_gradient_is_refused(parameters):
    """torch counts no writes of it, and ends in an error where its version is asked for."""
    with torch.inference_mode():
        parameters[1].grad = torch.ones(2, 2)
    guard = GradGuard(parameters, NAMES)
    assert guard.collect_written() is None
    with pytest.raises(ValueError, match="the gradient of 'b' was made under torch.inference_mode"):
        guard.written(guard.collect())


def test_what_was_used_can_be_restored_and_keeps_no_gradient_alive(parameters):
    guard = GradGuard(parameters, NAMES)
    before = guard.snapshot()
    guard.use(*guard.collect_written())
    used = guard.snapshot()
    guard.restore(before)
    assert guard.collect_written() is not None
    guard.restore(used)
    assert guard.collect_written() is None
    alive = [weakref.ref(parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


LAYOUTS = {
    "none": lambda tensor: None,
    "another type": lambda tensor: tensor.double(),
    "another type of the same size": lambda tensor: tensor.to(torch.int32),
    "fewer elements": lambda tensor: tensor[:2],
    "another order in memory": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "gaps": lambda tensor: torch.zeros(3, 2, 4, 6)[..., :5],
    "another number of dimensions": lambda tensor: tensor.flatten(),
    "sparse": lambda tensor: tensor.to_sparse(),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_another_layout_are_noticed(layout, own):
    tensors = [torch.ones(3, 2, 4, 5) for _ in range(3)]
    layouts = GradLayouts(tensors, own)
    for i in range(3):
        copies = [tensor.clone() for tensor in tensors]
        assert layouts.pointers(copies, own).tolist() == [copy.data_ptr() for copy in copies]
        assert layouts.pointers(copies, not own) is None
        copies[i] = LAYOUTS[layout](copies[i])
        assert layouts.pointers(copies, own) is None, i
        assert layouts.pointers(copies[:i] + copies[i + 1 :], own) is None, i


def test_layouts_differ_from_gradient_to_gradient():
    tensors = [torch.ones(()), torch.ones(0, 3), torch.ones(2, 3).T, torch.ones(4, dtype=torch.bfloat16)]
    layouts = GradLayouts(tensors, own=True)
    copies = [tensor.clone() for tensor in tensors]
    assert layouts.pointers(copies, True).tolist() == [copy.data_ptr() for copy in copies]
    assert layouts.pointers(copies[::-1], True) is None


@pytest.mark.parametrize("lacks", ["numba", "the interface", "enough checks"])
def test_passes_stay_in_python_where_compiled_ones_cannot_be(lacks, monkeypatch):
    monkeypatch.setattr(guards, "_look", None)
    monkeypatch.setattr(guards, "_checks", 0)
    monkeypatch.setattr(guards, "_SOME", 5)
    monkeypatch.setattr(guards, "_SOME_WITH_NUMBA", 5)
    monkeypatch.delitem(sys.modules, "tristep.kernels.backends.cpu.look", raising=False)
    if lacks == "numba":
        monkeypatch.setitem(sys.modules, "numba", None)
    if lacks == "the interface":  # or it is that of another package
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1"))
    found = [guards.look_in_use() for _ in range(5 if lacks == "enough checks" else 8)]
    assert found == [None] * len(found)
    tensors = [torch.ones(2, 2) for _ in range(3)]
    guard = PointerGuard(tensors)
    assert guard.passes(tensors)
    assert not guard.passes(tensors[::-1])
