"""What Trainer does: steps, rates, multipliers, which gradients count as fresh, and models that change between steps."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import tristep
from tristep import StaleGradientError, Trainer, lr_scheduler
from tristep.trainer.optimizer import SGD, Adam, Optimizer, create

# Some roundings of float32 apart.
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def _values(*tensors):
    return [tensor.detach().cpu().double().numpy().copy() for tensor in tensors]


def _backward(params, gradients):
    """A real backward pass that gives every parameter exactly this gradient, added to what it has."""
    sum((param * gradient).sum() for param, gradient in zip(params, gradients, strict=True)).backward()


@pytest.fixture
def params(device):
    """Three parameters of different shapes, and gradients for them."""
    return [Parameter(torch.randn(shape, device=device)) for shape in ((3, 5), (7,), (2, 1, 4))]


@pytest.fixture
def gradients(params):
    return [torch.randn_like(param) for param in params]


# ---- the step --------------------------------------------------------------------------------------------------------


def test_the_equation_of_gluons_tutorial(engine, device):
    """After step(batch_size) a weight is w - lr / batch_size * grad."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, engine=engine)
    batch_size = 16
    for _ in range(3):
        net.zero_grad()
        net(torch.randn(batch_size, 4, device=device)).square().sum().backward()
        expected = [_values(w)[0] - 0.1 / batch_size * _values(w.grad)[0] for w in net.parameters()]
        trainer.step(batch_size)
        for weight, wanted in zip(_values(*net.parameters()), expected, strict=True):
            np.testing.assert_allclose(weight, wanted, **CLOSE)


@pytest.mark.parametrize("batch_size", [1, 4, 0.5, np.int64(3), np.float32(2.5), torch.tensor(8)])
def test_the_gradient_is_divided_by_the_batch_size(params, gradients, batch_size):
    trainer = Trainer(params, "sgd", {"learning_rate": 0.3, "rescale_grad": 2.0})
    before = _values(*params)
    _backward(params, gradients)
    trainer.step(batch_size)
    assert trainer.optimizer.rescale_grad == pytest.approx(2.0 / float(batch_size))
    for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
        np.testing.assert_allclose(_values(weight)[0], old - 0.3 * 2.0 / float(batch_size) * gradient, **CLOSE)


def test_the_batch_size_may_change_from_step_to_step_and_does_not_add_up(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    for batch_size in (4, 2, 8, 1):
        before = _values(*params)
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(batch_size)
        for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
            np.testing.assert_allclose(_values(weight)[0], old - gradient / batch_size, **CLOSE)


def test_gradients_are_left_as_they_are(params, gradients, engine):
    trainer = Trainer(params, "adam", {"wd": 0.1, "clip_gradient": 0.5}, engine=engine)
    for _ in range(3):
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(7)
        for param, gradient in zip(params, gradients, strict=True):
            assert torch.equal(param.grad, gradient)


def test_weights_stay_leaves_without_history(params, gradients, engine):
    trainer = Trainer(params, "sgd", {"momentum": 0.9}, engine=engine)
    places = [param.data_ptr() for param in params]
    for _ in range(2):
        _backward(params, gradients)
        trainer.step(1)
    assert all(param.is_leaf and param.requires_grad and param.grad_fn is None for param in params)
    assert [param.data_ptr() for param in params] == places


def test_backward_through_a_graph_from_before_the_step_is_refused(params, engine):
    """As with torch.optim: autograd must notice that a weight has changed."""
    loss = sum(param.square().sum() for param in params)
    loss.backward(retain_graph=True)
    Trainer(params, "sgd", engine=engine).step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_step_may_be_taken_in_any_gradient_mode(params, gradients, mode):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    before = _values(*params)
    for _ in range(2):
        trainer.zero_grad()
        _backward(params, gradients)
        with mode():
            trainer.step(1)
    for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
        np.testing.assert_allclose(_values(weight)[0], old - 2.5 * gradient, **CLOSE)


def test_step_is_allreduce_grads_and_update(params, gradients):
    twins = [Parameter(param.detach().clone()) for param in params]
    whole = Trainer(params, "adam", {"learning_rate": 0.1, "wd": 0.01})
    halves = Trainer(twins, "adam", {"learning_rate": 0.1, "wd": 0.01})
    for batch_size in (2, 4, 2):
        for trainer, those in ((whole, params), (halves, twins)):
            trainer.zero_grad()
            _backward(those, gradients)
        whole.step(batch_size)
        halves.allreduce_grads()
        halves.update(batch_size)
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))


def test_gradients_may_be_clipped_between_the_halves(params, gradients):
    """torch's own clipping, on the whole gradient, then a step of plain SGD."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = _values(*params)
    _backward(params, gradients)
    trainer.allreduce_grads()
    torch.nn.utils.clip_grad_norm_(params, max_norm=0.5)
    trainer.update(1)
    moved = [old - new for old, new in zip(before, _values(*params), strict=True)]
    assert math.sqrt(sum(float((part**2).sum()) for part in moved)) == pytest.approx(0.5, rel=1e-5)


def test_gradients_accumulate_over_backward_passes(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = _values(*params)
    for _ in range(4):
        _backward(params, gradients)
    trainer.step(4)
    for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
        np.testing.assert_allclose(_values(weight)[0], old - gradient, **CLOSE)


def test_it_trains_to_the_least_squares_solution(device):
    x = torch.randn(64, 3, device=device)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], device=device) + 0.3 + 0.1 * torch.randn(64, 1, device=device)
    net = torch.nn.Linear(3, 1).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.8})
    for _ in range(200):
        net.zero_grad(set_to_none=False)
        (net(x) - y).square().sum().backward()
        trainer.step(len(x))
    best = np.linalg.lstsq(np.c_[_values(x)[0], np.ones(64)], _values(y)[0], rcond=None)[0].ravel()
    found = np.concatenate([value.ravel() for value in _values(net.weight, net.bias)])
    np.testing.assert_allclose(found, best, atol=1e-4)


TORCH_PEERS = {
    # Ours, and torch's. MXNet adds epsilon elsewhere, so it is made too small to matter, and decays otherwise, so wd is 0
    # wherever it is not plain.
    "sgd": ("sgd", {"learning_rate": 0.05, "wd": 0.02}, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.02}),
    "momentum": (
        "sgd",
        {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.02},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02},
    ),
    "nag": (
        "nag",
        {"learning_rate": 0.05, "momentum": 0.9},
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    ),
    "adam": (
        "adam",
        {"learning_rate": 0.01, "epsilon": 1e-12, "wd": 0.02},
        torch.optim.Adam,
        {"lr": 0.01, "eps": 1e-12, "weight_decay": 0.02},
    ),
    "adamw": (
        "adamw",
        {"learning_rate": 0.01, "epsilon": 1e-12},
        torch.optim.AdamW,
        {"lr": 0.01, "eps": 1e-12, "weight_decay": 0},
    ),
    "adagrad": ("adagrad", {"learning_rate": 0.1, "eps": 1e-14}, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-14}),
    "adadelta": ("adadelta", {"rho": 0.8, "epsilon": 1e-4}, torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8, "eps": 1e-4}),
    "adamax": (
        "adamax",
        {"learning_rate": 0.01, "beta2": 0.9, "wd": 0.02},
        torch.optim.Adamax,
        {"lr": 0.01, "betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.02},
    ),
    "rmsprop": (
        "rmsprop",
        {"learning_rate": 0.01, "gamma1": 0.95, "epsilon": 1e-14},
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.95, "eps": 1e-14},
    ),
    "rmsprop centered": (
        "rmsprop",
        {"learning_rate": 0.01, "gamma1": 0.95, "gamma2": 0.8, "epsilon": 1e-14, "centered": True},
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.95, "eps": 1e-14, "momentum": 0.8, "centered": True},
    ),
}


@pytest.mark.parametrize("name", TORCH_PEERS)
def test_twenty_steps_like_torch_optim(name, params, engine):
    ours, kwargs, peer, peer_kwargs = TORCH_PEERS[name]
    twins = [Parameter(param.detach().double()) for param in params]  # the oracle computes in float64
    trainer, reference = Trainer(params, ours, kwargs, engine=engine), peer(twins, **peer_kwargs)
    for _ in range(20):
        gradients = [torch.randn_like(param) for param in params]
        trainer.zero_grad()
        reference.zero_grad()
        _backward(params, gradients)
        _backward(twins, [gradient.double() for gradient in gradients])
        trainer.step(batch_size=1)
        reference.step()
    for one, other in zip(_values(*params), _values(*twins), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_the_learning_rate_can_be_read_and_set(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5})
    assert trainer.learning_rate == 0.5
    trainer.set_learning_rate(0.125)
    assert trainer.learning_rate == 0.125
    before = _values(*params)
    _backward(params, gradients)
    trainer.step(1)
    for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
        np.testing.assert_allclose(_values(weight)[0], old - 0.125 * gradient, **CLOSE)


def test_a_new_rate_does_not_rescale_the_momentum(params, gradients):
    """The rate is folded into MXNet's momentum, unlike torch's."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    before = _values(*params)
    for rate in (1.0, 0.1):
        trainer.set_learning_rate(rate)
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
    for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
        np.testing.assert_allclose(_values(weight)[0], old - (1.0 + 0.5 * 1.0 + 0.1) * gradient, rtol=1e-5, atol=1e-6)


def test_a_scheduler_forbids_setting_the_rate(params):
    trainer = Trainer(params, "sgd", {"lr_scheduler": lr_scheduler.PolyScheduler(100, base_lr=0.4)})
    with pytest.raises(UserWarning, match="decided by PolyScheduler.*cannot be set to 0.1.*lr_scheduler = None first"):
        trainer.set_learning_rate(0.1)
    assert trainer.learning_rate == 0.4
    trainer.optimizer.lr_scheduler = None
    trainer.set_learning_rate(0.1)
    assert trainer.learning_rate == 0.1


def test_factor_scheduler_in_a_trainer(params, gradients):
    """MXNet's test_trainer_lr_sched: the rate drops after updates 3, 5, 7 and so on."""
    schedule = lr_scheduler.FactorScheduler(2, factor=0.1, base_lr=1)
    trainer = Trainer(params, "sgd", {"learning_rate": 1, "lr_scheduler": schedule})
    rate = 1
    for i in range(10):
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
        if i % 2 == 0:
            assert trainer.learning_rate == pytest.approx(rate)
            rate *= 0.1
    assert trainer.optimizer.num_update == 10


def test_the_first_step_asks_a_schedule_for_update_1(params, gradients):
    asked = []

    def schedule(num_update):
        asked.append(num_update)
        return 0.25 * num_update

    trainer = Trainer(params, "sgd", {"lr_scheduler": schedule})
    for wanted in (0.25, 0.5):
        before = _values(*params)
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
        for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
            np.testing.assert_allclose(_values(weight)[0], old - wanted * gradient, **CLOSE)
    assert asked == [1, 2]


def test_the_optimizer_is_at_hand(params):
    optimizer = Adam(beta1=0.8)
    assert Trainer(params, optimizer).optimizer is optimizer
    made = Trainer(params, "adam", {"beta1": 0.8}).optimizer
    assert type(made) is Adam
    assert made.beta1 == 0.8


def test_optimizer_params_may_be_pairs(params):
    assert Trainer(params, "sgd", (("learning_rate", 0.7), ("momentum", 0.2))).optimizer.momentum == 0.2


def test_hyper_parameters_can_be_changed_between_steps(params, gradients, engine):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, engine=engine)
    before, sums = _values(*params), [0.0] * len(params)
    for wd, clip in ((0.0, None), (0.5, None), (0.0, 0.25), (0.0, -1.0)):
        trainer.optimizer.wd, trainer.optimizer.clip_gradient = wd, clip
        for i, (value, gradient) in enumerate(zip(_values(*params), _values(*gradients), strict=True)):
            limited = np.clip(gradient, -clip, clip) if clip and clip > 0 else gradient
            sums[i] = sums[i] - (limited + wd * value)
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
    for weight, old, moved in zip(_values(*params), before, sums, strict=True):
        np.testing.assert_allclose(weight, old + moved, rtol=1e-5, atol=1e-6)


def test_switching_momentum_on_creates_its_state(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = _values(*params)
    for momentum in (0.0, 0.5, 0.5):
        trainer.optimizer.momentum = momentum
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
    for weight, old, gradient in zip(params, before, _values(*gradients), strict=True):
        np.testing.assert_allclose(_values(weight)[0], old - (1 + 1 + 1.5) * gradient, rtol=1e-5, atol=1e-6)


# ---- multipliers and kinds of params ---------------------------------------------------------------------------------


def _one_step_rates(trainer, params):
    """The rate of each parameter in one step with gradient 1."""
    before = _values(*params)
    trainer.zero_grad()
    _backward(params, [torch.ones_like(param) for param in params])
    trainer.step(1)
    return [float((old - new).mean()) for old, new in zip(before, _values(*params), strict=True)]


def test_multipliers_of_parameters_are_read_at_every_step(params):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    assert _one_step_rates(trainer, params) == pytest.approx([1, 1, 1], rel=1e-5)
    params[1].lr_mult = 0.25
    assert _one_step_rates(trainer, params) == pytest.approx([1, 0.25, 1], rel=1e-5)
    params[1].lr_mult, params[2].lr_mult = 2.0, 0.0
    assert _one_step_rates(trainer, params) == pytest.approx([1, 2, 0], rel=1e-5)
    del params[1].lr_mult, params[2].lr_mult
    assert _one_step_rates(trainer, params) == pytest.approx([1, 1, 1], rel=1e-5)


def test_wd_mult_of_parameters(params, gradients):
    params[0].wd_mult, params[1].wd_mult = 0.0, 3.0
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "wd": 0.1})
    before = _values(*params)
    _backward(params, gradients)
    trainer.step(1)
    for weight, old, gradient, wd in zip(_values(*params), before, _values(*gradients), (0, 0.3, 0.1), strict=True):
        np.testing.assert_allclose(weight, old - gradient - wd * old, **CLOSE)


def test_a_parameters_own_multiplier_comes_before_the_optimizers(params):
    """As under Gluon's Trainer, set_lr_mult reaches only parameters that have no multiplier of their own."""
    params[0].lr_mult = 0.5
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    trainer.optimizer.set_lr_mult({0: 4.0, 1: 2.0})
    assert _one_step_rates(trainer, params) == pytest.approx([0.5, 2, 1], rel=1e-5)
    trainer.optimizer.set_lr_mult({})
    assert _one_step_rates(trainer, params) == pytest.approx([0.5, 1, 1], rel=1e-5)


def test_multipliers_by_name(params):
    optimizer = SGD(learning_rate=1.0, param_idx2name={0: "a_weight", 1: "a_bias", 2: "b_weight"})
    trainer = Trainer(params, optimizer)
    optimizer.set_lr_mult({"a_bias": 2.0, "b_weight": 0.5})
    assert _one_step_rates(trainer, params) == pytest.approx([1, 2, 0.5], rel=1e-5)


def test_multipliers_of_unknown_parameters_are_refused():
    net = torch.nn.Linear(2, 1)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0})
    trainer.optimizer.set_lr_mult({"bias": 3.0, 0: 2.0})
    assert _one_step_rates(trainer, list(net.parameters())) == pytest.approx([2, 3], rel=1e-5)
    for given, key in (({"bais": 0.5}, "'bais'"), ({2: 0.5}, "2"), ({"0": 0.5}, "'0'")):
        for setter, argument in ((trainer.optimizer.set_lr_mult, "lr_mult"), (trainer.optimizer.set_wd_mult, "wd_mult")):
            with pytest.raises(ValueError, match=rf"{argument}\[{key}\]: no parameter has this name or index"):
                setter(given)
        made = SGD()
        made.set_wd_mult(given)
        with pytest.raises(ValueError, match=rf"wd_mult\[{key}\]: no parameter .* names 'bias', 'weight'"):
            Trainer([{"params": net.named_parameters(), "lr_mult": 0.5}], made)
    assert trainer.optimizer.multipliers(1) == (3.0, 1.0)
    assert not vars(net.weight)  # a trainer that is refused changes nothing


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({0: "bias", 1: "weight"}, r"param_idx2name\[0\]='bias': parameter 0 of this Trainer is 'weight'"),
        ({2: "weight"}, r"param_idx2name\[2\]='weight': there is no such parameter; indices are 0 to 1"),
    ],
)
def test_names_that_are_not_those_of_the_module_are_refused(names, message):
    """In MXNet's order of the parameters, say: the wrong one would not be decayed."""
    net = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=message):
        Trainer(net, "sgd", {"param_idx2name": names})
    Trainer(net, "sgd", {"param_idx2name": {0: "weight", 1: "bias"}})


@pytest.mark.parametrize("by_hand", [False, True])
def test_grad_req_is_not_ignored(by_hand):
    net = torch.nn.Linear(2, 1)
    net.bias.grad_req = "add"  # which torch does
    made = _MXNetsAdam() if by_hand else SGD(learning_rate=1.0)
    trainer = Trainer(net, made)
    net(torch.ones(1, 2)).sum().backward()
    trainer.step(1)
    before = net.weight.detach().clone()
    net.weight.grad_req = "null"
    net(torch.ones(1, 2)).sum().backward()
    for refused in (lambda: trainer.step(1), lambda: Trainer(net, "sgd")):
        with pytest.raises(ValueError, match="grad_req='null' of parameter 'weight': .*requires_grad_"):
            refused()
    assert torch.equal(net.weight, before)


class _MXNetsAdam(Optimizer):
    """Adam as MXNet 1.9.1's optimizers that update several parameters together are written."""

    aggregate_num = 2

    def create_state(self, index, weight):
        return (torch.zeros_like(weight), torch.zeros_like(weight))

    def update(self, indices, weights, grads, states):
        if not isinstance(indices, (tuple, list)):
            indices, weights, grads, states = [indices], [weights], [grads], [states]
        assert len(indices) <= 2
        assert len({weight.dtype for weight in weights}) == 1
        self._update_count(indices)
        lrs, wds = self._get_lrs(indices), self._get_wds(indices)
        for i, weight, grad, (mean, var), lr, wd in zip(indices, weights, grads, states, lrs, wds, strict=True):
            t = self._index_update_count[i]
            grad = grad * self.rescale_grad + wd * weight
            mean.mul_(0.9).add_(grad, alpha=0.1)
            var.mul_(0.999).addcmul_(grad, grad, value=0.001)
            weight -= lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * mean / (var.sqrt() + 1e-12)


def test_an_optimizer_that_updates_lists_as_in_mxnet():
    params = [Parameter(torch.linspace(1, 2, 3, dtype=torch.float32 if i == 1 else torch.float64)) for i in range(4)]
    ours = [Parameter(param.detach().clone()) for param in params]
    theirs = torch.optim.Adam(params, lr=0.1, weight_decay=0.5, eps=1e-12)
    trainer = Trainer(ours, _MXNetsAdam(learning_rate=0.1, wd=0.5))
    for n in range(3):
        for i, (one, other) in enumerate(zip(params, ours, strict=True)):
            one.grad = torch.full_like(one, math.sin(4 * n + i))
            other.grad = one.grad * 2
        theirs.step()
        trainer.step(2)
    for one, other in zip(params, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)
    with pytest.raises(TypeError, match="does not support item assignment"):
        trainer.optimizer._index_update_count[0] = 7


def test_groups_have_multipliers(params):
    groups = [{"params": params[:1], "lr_mult": 0.1}, {"params": [("head", params[1])]}, {"params": params[2], "wd_mult": 0}]
    trainer = Trainer(groups, "sgd", {"learning_rate": 1.0})
    assert _one_step_rates(trainer, params) == pytest.approx([0.1, 1, 1], rel=1e-5)
    assert params[2].wd_mult == 0.0
    assert not vars(params[1])
    assert set(trainer.state_dict()["counts"]) == {"0.0", "head", "2.0"}


def test_biases_decay(device):
    """Under a Trainer nothing is exempt from the decay, unlike in MXNet's Module."""
    net = torch.nn.Linear(2, 2).to(device)
    before = _values(net.weight, net.bias)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0, "wd": 0.5})
    (net(torch.zeros(1, 2, device=device)) * 0).sum().backward()
    trainer.step(1)
    for now, old in zip(_values(net.weight, net.bias), before, strict=True):
        np.testing.assert_allclose(now, 0.5 * old, **CLOSE)


def test_names_decide_the_decay_where_they_are_given(device):
    """MXNet 1.9.1's rule, for names with underscores and, as torch writes them, with dots."""
    names = ["fc_weight", "fc_bias", "bn_gamma", "bn_beta", "fc.weight", "fc.bias"]
    params = [Parameter(torch.ones(3, device=device)) for _ in names]
    optimizer = SGD(learning_rate=1.0, wd=0.5, param_idx2name=dict(enumerate(names)))
    trainer = Trainer(params, optimizer)
    _backward(params, [torch.zeros_like(param) for param in params])
    trainer.step(1)
    assert [float(param.detach()[0]) for param in params] == [0.5, 1, 0.5, 1, 0.5, 1]
    optimizer.set_wd_mult({"fc_bias": 1.0})
    assert optimizer.multipliers(1) == (1.0, 1.0)
    assert optimizer.multipliers(3) == (1.0, 0.0)


def test_a_dict_is_taken_in_the_order_of_its_names(device):
    params = {name: Parameter(torch.zeros(1, device=device)) for name in ("b", "a9", "a", "a10")}
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    order = [params[name] for name in ("a", "a10", "a9", "b")]
    assert all(trainer.optimizer.param_dict[i] is param for i, param in enumerate(order))
    trainer.optimizer.set_lr_mult({1: 7.0})
    assert _one_step_rates(trainer, order) == pytest.approx([1, 7, 1, 1])


@pytest.mark.parametrize(
    "form",
    [
        lambda net: net,
        lambda net: net.parameters(),
        lambda net: list(net.parameters()),
        lambda net: net.named_parameters(),
        lambda net: dict(net.named_parameters()),
        lambda net: [{"params": net.parameters()}],
        lambda net: torch.nn.ParameterList(net.parameters()),
        lambda net: ({"params": [p]} for p in net.parameters()),
    ],
    ids=["module", "generator", "list", "pairs", "dict", "group", "ParameterList", "generator of groups"],
)
def test_params_come_in_many_forms(form, device):
    net = torch.nn.Linear(3, 2).to(device)
    trainer = Trainer(form(net), "sgd", {"learning_rate": 1.0})
    assert _one_step_rates(trainer, [net.weight, net.bias]) == pytest.approx([1, 1], rel=1e-5)


@pytest.mark.parametrize("form", ["a module", "copies", "in backward", "a list"])
def test_nadam_takes_a_modules_parameters_in_gluons_order(form):
    """One momentum schedule goes from parameter to parameter: of a module by name, bias first; of a list as it is."""
    net = torch.nn.Linear(3, 2).double()
    nets = [net, *(tristep.replicate(net, ["cpu"]) if form == "copies" else [])]
    given = {"copies": nets, "a list": list(net.parameters())}.get(form, net)
    trainer = Trainer(given, "nadam", {"learning_rate": 0.01}, update_on_kvstore=False if form == "copies" else None)
    names = ["weight", "bias"] if form == "a list" else ["bias", "weight"]
    values = {name: param.detach().numpy().copy() for name, param in net.named_parameters()}
    moments = dict.fromkeys(names, (0.0, 0.0))
    schedule = 1.0
    for t in (1, 2):
        now, following = (0.9 * (1 - 0.5 * 0.96 ** (n * 0.004)) for n in (t, t + 1))
        for name in names:
            schedule *= now
            g = np.full_like(values[name], 2.0 * t)
            mean, var = moments[name]
            mean, var = 0.9 * mean + 0.1 * g, 0.999 * var + 0.001 * g**2
            step = (1 - now) * g / (1 - schedule) + following * mean / (1 - schedule * following)
            values[name] = values[name] - 0.01 * step / (np.sqrt(var / (1 - 0.999**t)) + 1e-8)
            moments[name] = mean, var
        if form == "in backward":
            with trainer.step_in_backward(1):
                sum((2.0 * t * param).sum() for param in net.parameters()).backward()
        else:
            for each in nets:
                for param in each.parameters():
                    param.grad = torch.full_like(param, 2.0 * t / len(nets))
            trainer.step(1)
    for each in nets:
        for name, param in each.named_parameters():
            np.testing.assert_allclose(param.detach().numpy(), values[name], rtol=1e-12)


@pytest.mark.parametrize("form", [lambda net: net, lambda net: [*net, *net], lambda net: [net[0], net[1], net[0]]])
def test_a_shared_parameter_is_updated_once(form, device):
    shared = Parameter(torch.zeros(3, device=device))
    net = torch.nn.ParameterList([shared, Parameter(torch.zeros(2, device=device)), shared])
    trainer = Trainer(form(net), "sgd", {"learning_rate": 1.0})
    assert _one_step_rates(trainer, [net[0], net[1]]) == [1, 1]
    assert list(trainer.optimizer.counts.values()) == [1, 1]


def test_tied_layers_are_updated_once_with_the_summed_gradient(device):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)).to(device)
    net[1].weight = net[0].weight
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1})
    net(torch.ones(1, 2, device=device)).sum().backward()
    expected = _values(net[0].weight)[0] - 0.1 * _values(net[0].weight.grad)[0]
    trainer.step(1)
    np.testing.assert_allclose(_values(net[1].weight)[0], expected, **CLOSE)


def test_repr_says_what_is_trained_and_how(params):
    text = repr(Trainer(params, "sgd", {"momentum": 0.5}))
    assert text.startswith("Trainer(3 parameters, 30 elements, SGD(momentum=0.5")


# ---- which gradients are fresh ---------------------------------------------------------------------------------------


def _fails_and_changes_nothing(trainer, params, everything, match):
    params = list(params)
    before = everything(trainer, params)
    with pytest.raises(StaleGradientError, match=match):
        trainer.step(1)
    assert everything(trainer, params) == before


@pytest.fixture
def net(device):
    """Two layers, of which a loss may reach one or both."""
    return torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)}).to(device)


@pytest.fixture
def trainer(net):
    return Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})


def _reach_both(net):
    x = torch.ones(1, 2, device=net["head"].weight.device)
    net["head"](net["body"](x)).sum().backward()


def _reach_head(net):
    net["head"](torch.ones(1, 2, device=net["head"].weight.device)).sum().backward()


def _reach_body(net):
    net["body"](torch.ones(1, 2, device=net["head"].weight.device)).sum().backward()


def test_the_error_is_gluons_and_a_runtime_error():
    assert issubclass(StaleGradientError, UserWarning)
    assert issubclass(StaleGradientError, RuntimeError)


def test_a_step_before_any_backward_pass_is_refused(net, trainer, everything):
    everyone = r"'body.weight' \(no gradient\), 'body.bias' \(no .*, 'head.weight' .*, 'head.bias' .*call backward\(\)"
    _fails_and_changes_nothing(trainer, net.parameters(), everything, everyone)
    _reach_both(net)
    trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {1}


def test_a_second_step_without_backward_is_refused(net, trainer, everything):
    _reach_both(net)
    trainer.step(1)
    for _ in range(2):
        _fails_and_changes_nothing(trainer, net.parameters(), everything, "'body.weight', 'body.bias', 'head.weight', 'h")


def test_a_part_without_backward_is_named(net, trainer, everything):
    _reach_both(net)
    trainer.step(1)
    _reach_head(net)
    _fails_and_changes_nothing(trainer, net.parameters(), everything, r"step for 'body.weight', 'body.bias': call")


def test_a_long_list_of_stale_parameters_is_cut(device):
    trainer = Trainer([Parameter(torch.zeros(1, device=device)) for _ in range(20)], "sgd")
    with pytest.raises(StaleGradientError, match=r"'7' \(no gradient\) and 12 more"):
        trainer.step(1)


def test_a_refused_step_uses_no_gradient_up(net, trainer):
    """Gluon forgets that gradients before the stale one were fresh; here the missing ones can be supplied."""
    _reach_both(net)
    trainer.step(1)
    net.zero_grad()
    _reach_head(net)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    _reach_body(net)
    trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {2}


def test_after_a_refused_step_training_goes_on_as_if_it_had_not_been(params, engine):
    twins = [Parameter(param.detach().clone()) for param in params]
    one, other = (Trainer(those, "adam", {"wd": 0.1}, engine=engine) for those in (params, twins))
    for step in range(4):
        gradients = [torch.randn_like(param) for param in params]
        for trainer, those in ((one, params), (other, twins)):
            trainer.zero_grad(set_to_none=step % 2 == 0)
            if trainer is one:
                with pytest.raises(StaleGradientError):
                    trainer.step(100)
                _backward(those[:1], gradients[:1])
                with pytest.raises(StaleGradientError):
                    trainer.step(100)
                _backward(those[1:], gradients[1:])
            else:
                _backward(those, gradients)
            trainer.step(2)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_a_refused_first_step_takes_no_copies_of_weights(device, engine):
    """A master copy from then would undo what happens to the weight until the first real step."""
    weight = Parameter(torch.ones(4, device=device, dtype=torch.float16))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0, "multi_precision": True}, engine=engine)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    with torch.no_grad():
        weight.fill_(3.0)
    weight.grad = torch.ones_like(weight)
    trainer.step(1)
    assert weight.tolist() == [2.0] * 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_forgetting_gradients_does_not_make_them_fresh(net, trainer, everything, set_to_none):
    for _ in range(2):
        _reach_both(net)
        trainer.step(1)
        trainer.zero_grad(set_to_none=set_to_none)
        assert all(param.grad is None if set_to_none else not param.grad.any() for param in net.parameters())
        _fails_and_changes_nothing(trainer, net.parameters(), everything, "'head.bias'")


def test_a_fresh_gradient_that_is_zeroed_stays_fresh(net, trainer):
    _reach_both(net)
    trainer.zero_grad(set_to_none=False)
    before = net["body"].bias.detach().clone()
    trainer.step(1)
    assert torch.allclose(net["body"].bias, before * (1 - 0.1 * 0.1))  # only the decay acts


def test_zero_grad_without_gradients(trainer, net):
    trainer.zero_grad(set_to_none=False)
    trainer.zero_grad()
    assert all(param.grad is None for param in net.parameters())


def test_gradients_of_several_backward_passes_add_up_in_place(engine, device):
    """As in torch.optim, with the gradients in the same memory all along."""
    nets = [torch.nn.Linear(4, 3).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    trainer = Trainer(nets[0], "sgd", {"learning_rate": 0.1, "momentum": 0.9}, engine=engine)
    optimizer = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9)
    places = set()
    for _ in range(3):
        parts = [torch.randn(n, 4, device=device) for n in (2, 5, 1)]
        for x in parts:
            nets[0](x).square().sum().backward()
        places.add(tuple(param.grad.data_ptr() for param in nets[0].parameters()))
        trainer.step(batch_size=8)
        trainer.zero_grad(set_to_none=False)
        optimizer.zero_grad()
        (nets[1](torch.cat(parts)).square().sum() / 8).backward()
        optimizer.step()
    assert len(places) == 1
    for weight, wanted in zip(_values(*nets[0].parameters()), _values(*nets[1].parameters()), strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch cannot add up in another type")
@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_of_16_bits_may_add_up_in_float32(in_backward, engine, device):
    """512 of them: in bfloat16 the sum would stay at 2, where 2 + 2^-7 is a tie that goes down."""
    weight = Parameter(torch.ones(5, device=device, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    trainer = Trainer([weight], "sgd", {"learning_rate": 0.125}, engine=engine)
    for _ in range(511):
        (weight * 2**-7).sum().backward()
    assert weight.grad.dtype == torch.float32
    if in_backward:
        with trainer.step_in_backward(1):
            (weight * 2**-7).sum().backward()
    else:
        (weight * 2**-7).sum().backward()
        trainer.step(1)
    assert weight.tolist() == [0.5] * 5


def test_a_gradient_of_zeros_from_backward_is_fresh(params):
    trainer = Trainer(params, "sgd")
    for _ in range(2):
        _backward(params, [torch.zeros_like(param) for param in params])
        trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {2}


def test_backward_into_the_same_gradient_makes_it_fresh(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = _values(*params)
    for _ in range(3):  # the gradient grows: 1, 2, 3
        _backward(params, gradients)
        trainer.step(1)
    for weight, old, gradient in zip(_values(*params), before, _values(*gradients), strict=True):
        np.testing.assert_allclose(weight, old - 6 * gradient, rtol=1e-5, atol=1e-6)


def test_new_gradients_are_fresh_even_where_the_old_ones_lay(params, gradients):
    """Freed memory and Python's ids are used again, so that a new gradient may look like the old one."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before, seen = _values(*params), set()
    for _ in range(50):
        trainer.zero_grad()
        _backward(params, gradients)
        seen.add((id(params[0].grad), params[0].grad.data_ptr()))
        trainer.step(50)
    assert len(seen) < 50  # else nothing was shown
    for weight, old, gradient in zip(_values(*params), before, _values(*gradients), strict=True):
        np.testing.assert_allclose(weight, old - gradient, rtol=1e-4, atol=1e-5)


def test_the_used_gradient_is_stale_even_when_put_back(params, gradients, everything):
    trainer = Trainer(params, "sgd")
    _backward(params, gradients)
    trainer.step(1)
    used = [param.grad for param in params]
    trainer.zero_grad()
    for param, gradient in zip(params, used, strict=True):
        param.grad = gradient
    _fails_and_changes_nothing(trainer, params, everything, "'0', '1', '2'")


AFTER_NEW_GRADIENTS = {
    "all used before": lambda params, used: [setattr(param, "grad", old) for param, old in zip(params, used, strict=True)],
    "one used before": lambda params, used: setattr(params[1], "grad", used[1]),
    "one missing": lambda params, used: setattr(params[2], "grad", None),
    "the same ones": lambda params, used: None,
}


@pytest.mark.parametrize("what", AFTER_NEW_GRADIENTS)
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_stale_gradients_after_several_new_ones(params, gradients, everything, what, rounds):
    """The quick way for new gradients keeps less in mind of them; it must not take a stale one, whatever came before."""
    trainer = Trainer(params, "adam")
    for _ in range(rounds):
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
    used = [param.grad for param in params]
    if what != "the same ones":
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
    AFTER_NEW_GRADIENTS[what](params, used)
    before = everything(trainer, params)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    assert everything(trainer, params) == before
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {rounds + 1}


def test_the_same_gradients_written_anew_after_several_new_ones(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = _values(*params)
    for _ in range(3):
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
    for _ in range(4):  # from one way of looking to another
        for param, gradient in zip(params, gradients, strict=True):
            param.grad.copy_(gradient)
        trainer.step(1)
    for weight, old, gradient in zip(_values(*params), before, _values(*gradients), strict=True):
        np.testing.assert_allclose(weight, old - 7 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_gradient_written_by_hand_is_fresh(params, gradients, steps_before):
    """Gluon only looks at backward; here whatever writes to the gradient counts."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    for _ in range(steps_before):
        _backward(params, gradients)
        trainer.step(1)
    before = _values(*params)
    for param in params:
        param.grad = torch.ones_like(param)
    trainer.step(1)
    for param in params:
        param.grad.add_(1.0)
    trainer.step(1)
    for param in params:
        param.grad.data = torch.full_like(param, 4.0)  # another memory in the same tensor
        param.grad.mul_(1.0)
    trainer.step(1)
    for weight, old in zip(_values(*params), before, strict=True):
        np.testing.assert_allclose(weight, old - 1 - 2 - 4, rtol=1e-5, atol=1e-6)


def test_torchs_zeroing_counts_as_writing(net, trainer):
    """net.zero_grad(set_to_none=False) cannot be told from a gradient that somebody set; Trainer.zero_grad can."""
    _reach_both(net)
    trainer.step(1)
    net.zero_grad(set_to_none=False)
    trainer.step(1)
    assert set(trainer.optimizer.counts.values()) == {2}


def test_ignoring_stale_gradients_leaves_their_parameters_alone(net, trainer, everything):
    _reach_both(net)
    trainer.step(1)
    body = list(net["body"].parameters())
    for _ in range(3):
        before, states = [param.detach().clone() for param in body], trainer.state_dict()["state"]
        momenta = {name: states[name]["mom"].clone() for name in ("body.weight", "body.bias", "head.weight")}
        head = net["head"].weight.detach().clone()
        _reach_head(net)
        trainer.step(1, ignore_stale_grad=True)
        states = trainer.state_dict()["state"]
        assert all(torch.equal(param, old) for param, old in zip(body, before, strict=True))
        assert torch.equal(states["body.weight"]["mom"], momenta["body.weight"])
        assert torch.equal(states["body.bias"]["mom"], momenta["body.bias"])
        assert not torch.equal(states["head.weight"]["mom"], momenta["head.weight"])
        assert not torch.equal(net["head"].weight, head)
    assert trainer.state_dict()["counts"] == {"body.weight": 1, "body.bias": 1, "head.weight": 4, "head.bias": 4}
    assert trainer.optimizer.num_update == 4
    _fails_and_changes_nothing(trainer, net.parameters(), everything, "'body.weight'")


def test_ignoring_when_everything_is_stale_changes_nothing(net, trainer, everything):
    _reach_both(net)
    trainer.step(1)
    before = everything(trainer, net.parameters())
    trainer.step(1, ignore_stale_grad=True)
    trainer.step(1, ignore_stale_grad=True)
    assert everything(trainer, net.parameters()) == before


def test_a_skipped_parameter_has_its_own_bias_correction(params, engine):
    """Adam's t is the parameter's own count: one that comes in late starts at 1. torch.optim does the same."""
    twins = [Parameter(param.detach().double()) for param in params]
    trainer = Trainer(params, "adam", {"learning_rate": 0.01, "epsilon": 1e-12}, engine=engine)
    reference = torch.optim.Adam(twins, lr=0.01, eps=1e-12)
    for step in range(6):
        fresh = [0, 1, 2] if step in (0, 3) else [step % 3, (step + 1) % 3]
        for those in (params, twins):
            for param in those:
                param.grad = None
        gradients = [torch.randn_like(params[i]) for i in fresh]
        _backward([params[i] for i in fresh], gradients)
        _backward([twins[i] for i in fresh], [gradient.double() for gradient in gradients])
        trainer.step(1, ignore_stale_grad=True)
        reference.step()
    assert len(set(trainer.optimizer.counts.values())) > 1
    for one, other in zip(_values(*params), _values(*twins), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_all_parameters_of_a_step_have_one_rate(params, gradients):
    """A schedule is asked once for a step, for the largest count in it, also for parameters that lag behind."""
    trainer = Trainer(params, "sgd", {"lr_scheduler": lambda num_update: float(num_update)})
    _backward(params[:2], gradients[:2])
    trainer.step(1, ignore_stale_grad=True)
    assert _one_step_rates(trainer, params) == pytest.approx([2, 2, 2], rel=1e-5)
    assert list(trainer.optimizer.counts.values()) == [2, 2, 1]


def test_parameters_frozen_from_the_start_are_left_alone(net, everything):
    net["body"].requires_grad_(False)
    before = [param.clone() for param in net["body"].parameters()]
    trainer = Trainer(net, "sgd", {"wd": 0.1})
    for _ in range(2):
        net.zero_grad(set_to_none=False)
        _reach_both(net)
        trainer.step(1)
    assert all(torch.equal(param, old) for param, old in zip(net["body"].parameters(), before, strict=True))
    assert trainer.state_dict()["counts"]["head.bias"] == 2
    _fails_and_changes_nothing(trainer, net.parameters(), everything, "step for 'head.weight', 'head.bias': call")


@pytest.mark.parametrize("left", ["as it was", "written to", "zeroed by the module", "none"])
def test_parameters_frozen_later_are_left_alone_whatever_gradient_they_have(net, trainer, left):
    for _ in range(2):
        _reach_both(net)
        trainer.step(1)
    net["body"].requires_grad_(False)
    before = [param.clone() for param in net["body"].parameters()]
    for _ in range(2):
        for param in net["body"].parameters():
            if left == "written to":
                param.grad.add_(1.0)
            elif left == "none":
                param.grad = None
        if left == "zeroed by the module":
            net.zero_grad(set_to_none=False)
        _reach_both(net)
        trainer.step(1)
    assert all(torch.equal(param, old) for param, old in zip(net["body"].parameters(), before, strict=True))
    assert trainer.state_dict()["counts"] == {"body.weight": 2, "body.bias": 2, "head.weight": 4, "head.bias": 4}
    net["body"].requires_grad_(True)
    net.zero_grad()
    _reach_both(net)
    trainer.step(1)
    assert trainer.state_dict()["counts"]["body.weight"] == 3
    assert not torch.equal(net["body"].bias, before[1])


def test_a_step_that_fails_in_the_schedule_changes_nothing_and_can_be_repeated(params, gradients, everything, engine):
    broken = True

    def schedule(num_update):
        if broken and num_update == 2:
            raise RuntimeError("no rate today")
        return 1.0

    trainer = Trainer(params, "sgd", {"lr_scheduler": schedule, "momentum": 0.5}, engine=engine)
    before = _values(*params)
    _backward(params, gradients)
    trainer.step(2)
    _backward(params, gradients)
    now = everything(trainer, params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no rate today"):
            trainer.step(4)
        assert everything(trainer, params) == now
    broken = False
    trainer.step(4)
    for weight, old, gradient in zip(_values(*params), before, _values(*gradients), strict=True):
        np.testing.assert_allclose(weight, old - (0.5 + 0.25 + 0.5) * gradient, rtol=1e-5, atol=1e-6)


# ---- models that change between steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_state_follows_a_model_to_another_type(dtype, engine, device):
    weight = Parameter(torch.randn(5, 3, device=device))
    layer = torch.nn.ParameterList([weight])
    trainer = Trainer(layer, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, engine=engine)
    w, m = _values(weight)[0], 0.0
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-7
    for step in range(6):
        if step in (2, 4):
            layer.to(dtype if step == 2 else torch.float32)
            (state,) = trainer._updater.states[0]
            w = _values(layer[0])[0]  # rounded by the conversion, not by us
        gradient = torch.ones_like(layer[0]) * (step + 1)
        trainer.zero_grad()
        _backward([layer[0]], [gradient])
        trainer.step(1)
        m = 0.9 * m - 0.1 * (step + 1)
        w = w + m
        (state,) = trainer._updater.states[0]
        assert state.dtype == (torch.float64 if layer[0].dtype == torch.float64 else torch.float32)
        assert layer[0].dtype == (dtype if step in (2, 3) else torch.float32)
        np.testing.assert_allclose(_values(state)[0], np.full((5, 3), m), rtol=1e-5)
        np.testing.assert_allclose(_values(layer[0])[0], w, rtol=4 * eps, atol=4 * eps)


def test_models_of_several_types(engine, device):
    params = [Parameter(torch.ones(9, device=device, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    params += [Parameter(torch.ones(9, device=device, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)]
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5, "momentum": 0.5}, engine=engine)
    for _ in range(3):
        trainer.zero_grad()
        _backward(params, [torch.full_like(param, 0.25) for param in params])
        trainer.step(1)
    for param in params:  # 1 - 0.125 (1 + 1.5 + 1.75), all of it exact in every type
        assert param.tolist() == [0.46875] * 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_master_copy_keeps_steps_that_the_weight_is_too_coarse_for(dtype, engine, device):
    coarse, fine = (Parameter(torch.ones(3, device=device, dtype=dtype)) for _ in range(2))
    for param, multi_precision in ((coarse, False), (fine, True)):
        trainer = Trainer([param], "sgd", {"learning_rate": 1e-4, "multi_precision": multi_precision}, engine=engine)
        for _ in range(50):
            param.grad = torch.ones_like(param)
            trainer.step(1)
    assert coarse.tolist() == [1.0] * 3
    assert fine.tolist() == [torch.tensor(0.995, dtype=dtype).item()] * 3


def test_master_copies_come_and_go_with_the_type(device):
    layer = torch.nn.Linear(3, 1).to(device)
    trainer = Trainer(layer, "sgd", {"learning_rate": 0.1, "multi_precision": True})
    for step, dtype in enumerate((torch.float32, torch.float16, torch.float32, torch.bfloat16)):
        layer.to(dtype)
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        trainer.step(1)
        assert set(trainer._updater.masters) == (set() if dtype == torch.float32 else {0, 1}), step


def test_weights_may_move_in_memory(params, gradients, engine):
    twins = [Parameter(param.detach().clone()) for param in params]
    moving, resting = (Trainer(those, "adam", {"wd": 0.1}, engine=engine) for those in (params, twins))
    abandoned = []
    for step in range(5):
        for trainer, those in ((moving, params), (resting, twins)):
            trainer.zero_grad(set_to_none=step > 2)
            _backward(those, gradients)
            trainer.step(1)
        for param in params:
            abandoned.append((param.data, param.data.clone()))
            param.data = param.data.clone()
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))
    assert all(torch.equal(old, copied) for old, copied in abandoned)  # nothing is written where they were


def test_weights_written_in_place_are_read_anew(params, gradients, engine):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, engine=engine)
    for _ in range(2):
        with torch.no_grad():
            for param in params:
                param.fill_(5.0)
        trainer.zero_grad()
        _backward(params, gradients)
        trainer.step(1)
    for weight, gradient in zip(_values(*params), _values(*gradients), strict=True):
        np.testing.assert_allclose(weight, 5.0 - gradient, **CLOSE)


def test_state_follows_a_change_of_the_memory_format(engine, device):
    """Weight and state are walked in the order of memory, so both must change it together."""
    layer = torch.nn.Conv2d(3, 4, 2, bias=False).to(device)
    twin = copy.deepcopy(layer)
    kwargs = {"learning_rate": 0.1, "momentum": 0.9}
    trainers = [Trainer(those, "sgd", kwargs, engine=engine) for those in (layer, twin)]
    gradient = torch.randn_like(layer.weight)
    for step in range(4):
        if step in (1, 3):
            layer.to(memory_format=torch.channels_last if step == 1 else torch.contiguous_format)
            assert layer.weight.is_contiguous() == (step == 3)
        for trainer, those in zip(trainers, (layer, twin), strict=True):
            trainer.zero_grad()
            _backward([those.weight], [gradient])
            trainer.step(1)
    torch.testing.assert_close(layer.weight, twin.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_parameter_of_another_shape_is_refused(params, gradients, optimizer, everything, engine):
    """Its state has the old size; without a check it would be read and written beyond its end."""
    arguments = {} if optimizer == "adam" else {"momentum": 0.9}
    trainer = Trainer(params, optimizer, arguments, engine=engine)
    _backward(params, gradients)
    trainer.step(1)
    params[1].grad = None
    params[1].data = torch.ones(1000, device=params[1].device)
    gradients[1] = torch.ones_like(params[1])
    _backward(params, gradients)
    before = everything(trainer, params)
    with pytest.raises(ValueError, match=r"'1' has shape \(1000,\), its state \(7,\)"):
        trainer.step(1)
    assert everything(trainer, params) == before


def test_a_parameter_cut_where_it_lies_is_refused(params, gradients, everything, engine):
    """Pruning by a view: nothing has moved, but the state and what lies behind the weight belong to the old size."""
    trainer = Trainer(params, "sgd", {"momentum": 0.9}, engine=engine)
    _backward(params, gradients)
    trainer.step(1)
    trainer.zero_grad()
    whole = params[1].data
    params[1].data = whole[:4]
    assert params[1].data_ptr() == whole.data_ptr()
    gradients[1] = torch.ones_like(params[1])
    _backward(params, gradients)
    before, old = everything(trainer, params), whole.clone()
    with pytest.raises(ValueError, match=r"'1' has shape \(4,\), its state \(7,\)"):
        trainer.step(1)
    assert everything(trainer, params) == before
    assert torch.equal(whole, old)


def test_a_parameter_without_state_may_change_its_shape(params, gradients, engine):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, engine=engine)
    _backward(params, gradients)
    trainer.step(1)
    trainer.zero_grad()
    whole = params[1].data
    params[1].data = whole[:4]
    rest = whole[4:].clone()
    params[0].data = torch.zeros(50, device=whole.device)
    assert _one_step_rates(trainer, params) == pytest.approx([1, 1, 1], rel=1e-5)
    assert torch.equal(whole[4:], rest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("multi_precision", [False, True])
def test_the_state_follows_a_model_to_another_device(multi_precision):
    layer = torch.nn.Linear(3, 2).half()
    twin = copy.deepcopy(layer)
    kwargs = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": multi_precision}
    moving, resting = Trainer(layer, "sgd", kwargs), Trainer(twin, "sgd", kwargs)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        layer.to(device)
        for trainer, those in ((moving, layer), (resting, twin)):
            for param in those.parameters():
                param.grad = torch.ones_like(param)
            trainer.step(1)
        assert all(tensor.device.type == device for state in moving._updater.states.values() for tensor in state)
    torch.testing.assert_close(layer.cpu().weight, twin.weight)


def test_lazy_parameters_are_trained_once_they_exist(device):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(1, bias=False)).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    assert "0 elements" in repr(trainer)
    for ignore in (False, True):
        with pytest.raises(
            ValueError, match="'0.weight', '0.bias', '1.weight' of params not initialized yet: run the model"
        ):
            trainer.step(1, ignore_stale_grad=ignore)
    net(torch.ones(2, 3, device=device))
    assert _one_step_rates(trainer, list(net.parameters())) == pytest.approx([1, 1, 1], rel=1e-5)
    assert _one_step_rates(trainer, list(net.parameters())) == pytest.approx([1.5, 1.5, 1.5], rel=1e-5)
    assert set(trainer.state_dict()["state"]) == {"0.weight", "0.bias", "1.weight"}


def test_empty_and_scalar_parameters(engine, device):
    params = [Parameter(torch.zeros(shape, device=device)) for shape in ((0, 3), (), (2,))]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, engine=engine)
    for _ in range(2):
        trainer.zero_grad()
        _backward(params, [torch.ones_like(param) for param in params])
        trainer.step(1)
    assert params[1].item() == -2.5
    assert params[2].tolist() == [-2.5, -2.5]


# ---- copies of optimizers --------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.1},
    "nag": {"momentum": 0.9},
    "signum": {"wd_lh": 0.1},
    "adam": {"lr_scheduler": lr_scheduler.CosineScheduler(10, base_lr=0.01), "beta1": 0.8},
    "adamw": {"correct_bias": False},
    "adagrad": {"clip_gradient": 0.5},
    "rmsprop": {"centered": True},
    "dcasgd": {"momentum": 0.5},
    "sgld": {"seed": 5},
    "nadam": {"schedule_decay": 0.1},
    "adabelief": {"wd": 0.1},
    "ftrl": {"lamda1": 0.1},
    "lars": {"momentum": 0.9},
    "lans": {"wd": 0.1},
    "lbsgd": {"batch_scale": 2, "warmup_strategy": "lars"},
}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copied_optimizer_computes_the_same(name, duplicate, params, gradients):
    optimizer = create(name, **OPTIMIZERS[name])
    copied = duplicate(optimizer)
    assert type(copied) is type(optimizer)
    assert copied.settings() == optimizer.settings()
    twins = [Parameter(param.detach().clone()) for param in params]
    for trainer, those in ((Trainer(params, optimizer), params), (Trainer(twins, copied), twins)):
        for _ in range(3):
            trainer.zero_grad()
            _backward(those, gradients)
            trainer.step(1)
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))


def test_a_copy_counts_for_itself(params, gradients):
    optimizer = SGD()
    trainer = Trainer(params, optimizer)
    _backward(params, gradients)
    trainer.step(1)
    copied = copy.deepcopy(optimizer)
    _backward(params, gradients)
    trainer.step(1)
    assert (copied.num_update, optimizer.num_update) == (1, 2)
    assert (set(copied.counts.values()), set(optimizer.counts.values())) == ({1}, {2})


def test_public_names():
    assert tristep.Trainer is Trainer
    assert tristep.optimizer.SGD is SGD
    assert {"sgd", "nag", "adam", "adamw", "adagrad", "rmsprop", "signum"} <= set(tristep.optimizer.registered())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch looks at it
@pytest.mark.parametrize("what", ["training function", "step"])
def test_where_torch_compiles_a_trainer_steps_as_it_does_elsewhere(what):
    """As torch.optim does, whose weights are the judge."""
    ours, theirs = (torch.nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    trainer = Trainer(ours, "adam", {"learning_rate": 0.02})
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.02)
    step = torch.compile(trainer.step, backend="eager") if what == "step" else trainer.step

    def train(x):
        trainer.zero_grad()
        loss = ours(x).square().sum()
        loss.backward()
        step(1)
        return loss

    if what == "training function":
        train = torch.compile(train, backend="eager")
    for k in range(4):
        x = torch.full((2, 3), 0.5 + k)
        train(x)
        optimizer.zero_grad()
        theirs(x).square().sum().backward()
        optimizer.step()
    for weight, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)


def test_an_optimizer_belongs_to_the_last_trainer_that_was_given_it():
    """MXNet takes one for two without a word, and both count on it."""
    optimizer = tristep.optimizer.Adam()
    first, second = (torch.nn.Linear(2, 1) for _ in range(2))
    one, two = Trainer(first, optimizer), Trainer(second, optimizer)
    for net in (first, second):
        net(torch.ones(1, 2)).sum().backward()
    before = first.weight.detach().clone()
    for call in (one.step, one.update, lambda size, trainer=one: trainer.step_in_backward(size).__enter__()):
        with pytest.raises(RuntimeError, match="the Adam of this Trainer has been given to another Trainer since"):
            call(1)
    assert torch.equal(first.weight, before)
    two.step(1)
    assert optimizer.num_update == 1
    with pytest.warns(UserWarning, match="Adam has counted 1 updates for another Trainer, and counts on"):
        Trainer(first, optimizer)
