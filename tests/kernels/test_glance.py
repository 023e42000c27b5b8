"""The quick look at many tensors: it sees each thing that may change, and what Python's own questions would answer."""

import operator
import weakref

import numpy as np
import pytest
import torch

import tristep

glance = pytest.importorskip("tristep.kernels.glance", reason="numba is not installed")
pytest.importorskip("tristep.kernels.native")  # before any test makes glance another one


@pytest.fixture
def looked_at():
    """Parameters with gradients, the glance at them, and the versions that it last saw."""
    if not glance.GradientGlance.possible():
        pytest.skip("this torch lacks the functions")
    weights = [torch.nn.Parameter(torch.ones(n)) for n in (1, 2, 3)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    gradients = [weight.grad for weight in weights]
    where = [np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64) for tensors in (weights, gradients)]
    return weights, gradients, glance.GradientGlance(weights, gradients, *where)


def _versions(gradients):
    return np.array([gradient._version for gradient in gradients], dtype=np.int64)


def test_it_is_possible_with_this_torch():
    """Should a new torch take the functions away, steps become slower and nobody would notice."""
    assert glance.AddressGlance.possible()
    assert glance.GradientGlance.possible()
    assert glance.KindGlance.possible()


def test_written_gradients_are_fresh_and_their_versions_seen(looked_at):
    _, gradients, look = looked_at
    used, seen = _versions(gradients), np.zeros(3, dtype=np.int64)
    assert not look.fresh(used, seen)
    for gradient in gradients:
        gradient.add_(1)
    assert look.fresh(used, seen)
    assert seen.tolist() == [gradient._version for gradient in gradients]


@pytest.mark.parametrize("i", [0, 1, 2])
def test_a_single_gradient_that_was_not_written_to_is_seen(looked_at, i):
    _, gradients, look = looked_at
    used = _versions(gradients)
    for gradient in gradients[:i] + gradients[i + 1 :]:
        gradient.add_(1)
    assert not look.fresh(used, used.copy())


CHANGES = {
    "another gradient": lambda weight: setattr(weight, "grad", weight.grad.clone()),
    "no gradient": lambda weight: setattr(weight, "grad", None),
    "a frozen parameter": lambda weight: weight.requires_grad_(False),
    "a weight elsewhere": lambda weight: setattr(weight, "data", weight.detach().clone()),
    "a gradient elsewhere": lambda weight: setattr(weight.grad, "data", weight.grad.clone()),
    "a gradient that shares its memory": lambda weight: setattr(weight, "grad", weight.grad.detach()),
}


@pytest.mark.parametrize("i", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(looked_at, change, i):
    weights, gradients, look = looked_at
    used = _versions(gradients) - 1
    assert look.fresh(used, used.copy())
    CHANGES[change](weights[i])
    assert not look.fresh(used, used.copy())


def test_a_parameter_whose_contents_were_swapped_is_seen(looked_at):
    """`swap_tensors` gives a Python object another C++ object, and the old one may be gone."""
    weights, gradients, look = looked_at
    used = _versions(gradients) - 1
    other = torch.nn.Parameter(torch.zeros(2))
    torch.utils.swap_tensors(weights[1], other)
    del other
    assert not look.fresh(used, used.copy())


def test_a_change_of_the_weights_is_known_to_autograd(looked_at):
    weights, _, _ = looked_at
    before = [weight._version for weight in weights]
    glance.WeightGlance(weights).count_change()
    assert [weight._version for weight in weights] == [version + 1 for version in before]


def test_versions_of_gradients_that_are_needed(looked_at):
    weights, gradients, _ = looked_at
    torch.autograd.graph.increment_version([gradients[1]] * 2)
    look, seen = glance.WeightGlance(weights), np.zeros(len(weights), dtype=np.int64)
    used = [None] * len(weights)
    assert look.need(gradients, used, seen)
    assert seen.tolist() == [gradient._version for gradient in gradients]
    assert len(set(seen.tolist())) > 1
    weights[-1].requires_grad_(False)
    assert not look.need(gradients, used, seen)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_a_gradient_that_was_used_is_seen(looked_at, i):
    weights, gradients, _ = looked_at
    look, seen = glance.WeightGlance(weights), np.zeros(len(weights), dtype=np.int64)
    used = [weakref.ref(gradient.clone()) for gradient in gradients]  # to tensors that are gone
    assert look.need(gradients, used, seen)
    used[i] = weakref.ref(gradients[i])
    assert not look.need(gradients, used, seen)


def test_the_gradients_of_parameters_are_found_and_referred_to(looked_at):
    weights, gradients, _ = looked_at
    look = glance.WeightGlance(weights)
    assert glance._makers() is not None
    assert all(map(operator.is_, look.gradients(), gradients))
    references = look.references(gradients)
    assert all(reference() is gradient for reference, gradient in zip(references, gradients, strict=True))
    weights[1].grad = None
    del gradients[1]
    assert look.gradients()[1] is None
    assert [reference() is None for reference in references] == [False, True, False]


def test_gradients_that_python_has_not_met_yet_are_found(looked_at):
    weights, gradients, _ = looked_at
    for weight in weights:
        weight.grad = None
    sum((weight * weight).sum() for weight in weights).backward()
    gradients[:] = glance.WeightGlance(weights).gradients()
    assert all(gradient is weight.grad for gradient, weight in zip(gradients, weights, strict=True))
    assert all((gradient == 2 * weight).all() for gradient, weight in zip(gradients, weights, strict=True))


def test_where_python_objects_cannot_be_made_natively_python_makes_them(looked_at, monkeypatch):
    monkeypatch.setattr(glance, "_makers", lambda: None)
    weights, gradients, _ = looked_at
    look = glance.WeightGlance(weights)
    assert look.gradients() is None
    assert [reference() is gradient for reference, gradient in zip(look.references(gradients), gradients, strict=True)]


def test_dictionaries_that_are_not_empty_are_seen():
    assert glance.EmptyGlance.possible()
    own = [{}, {}, {}]
    look = glance.EmptyGlance(own)
    assert look()
    own[1]["lr_mult"] = 2.0
    assert not look()
    del own[1]["lr_mult"]
    assert look()


def test_addresses_are_seen():
    tensors = [torch.ones(4), torch.ones(0), torch.ones(2)]
    look = glance.AddressGlance(tensors, np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64))
    assert look()
    tensors[2].data = torch.ones(2)
    assert not look()


KINDS = {
    "none": lambda tensor: None,
    "another type": lambda tensor: tensor.double(),
    "another type of the same size": lambda tensor: tensor.to(torch.int32),
    "fewer elements": lambda tensor: tensor[:2],
    "another order in memory": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "gaps": lambda tensor: torch.zeros(3, 2, 4, 6)[..., :5],
    "another number of dimensions": lambda tensor: tensor.flatten(),
    "sparse": lambda tensor: tensor.to_sparse(),
}


@pytest.mark.parametrize("i", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_another_kind_are_seen(kind, i):
    tensors = [torch.ones(3, 2, 4, 5) for _ in range(3)]
    look = glance.KindGlance(tensors)
    copies = [tensor.clone() for tensor in tensors]
    addresses = look(copies)
    assert addresses.tolist() == [copy.data_ptr() for copy in copies]
    copies[i] = KINDS[kind](copies[i])
    assert look(copies) is None
    assert look(copies[:i] + copies[i + 1 :]) is None


def test_addresses_that_are_no_multiples_of_16_are_seen_where_it_matters():
    tensors = [torch.ones(6), torch.ones(6)]
    look = glance.KindGlance(tensors)
    odd = [torch.ones(6), torch.ones(7)[1:]]
    assert look(odd).tolist() == [tensor.data_ptr() for tensor in odd]
    assert look(odd, aligned=True) is None
    assert look(tensors, aligned=True) is not None


def test_kinds_differ_from_gradient_to_gradient():
    tensors = [torch.ones(()), torch.ones(0, 3), torch.ones(2, 3).T, torch.ones(4, dtype=torch.bfloat16)]
    look = glance.KindGlance(tensors)
    copies = [tensor.clone() for tensor in tensors]
    addresses = look(copies)
    assert addresses.tolist() == [copy.data_ptr() for copy in copies]
    assert look(copies[::-1]) is None


@pytest.mark.parametrize("missing", ["a function", "the place in the Python object", "the right answers"])
def test_without_it_python_asks_and_the_steps_are_the_same(monkeypatch, missing):
    if missing == "a function":
        monkeypatch.setattr(glance, "library_function", lambda *names: None)
    elif missing == "the place in the Python object":
        monkeypatch.setattr(glance, "_offset", lambda: None)
    else:
        monkeypatch.setattr(glance, "_answer_rightly", lambda *functions: False)
        monkeypatch.setattr(glance, "_tells_kinds_apart", lambda functions: False)
    expected = _trained()
    glance._functions.cache_clear()
    glance._kind_functions.cache_clear()
    try:
        assert not glance.GradientGlance.possible()
        assert not glance.KindGlance.possible()
        assert not glance.WeightGlance.possible()
        assert torch.equal(_trained(), expected)
    finally:
        glance._functions.cache_clear()
        glance._kind_functions.cache_clear()


def _trained():
    """A weight after ten steps, each a stale one too many, in the second half with new gradients."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    trainer = tristep.Trainer(net, "adam", {"learning_rate": 0.1})
    for t in range(10):
        if t >= 5:
            trainer.zero_grad()
        net(torch.rand(2, 3)).sum().backward()
        trainer.step(2)
        with pytest.raises(tristep.StaleGradientError):
            trainer.step(2)
    return net.weight.detach().clone()
