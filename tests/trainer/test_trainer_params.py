"""The Trainer: learning rates, kinds of params, their names, order and multipliers."""

import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from trainer_cases import backward_with, one_step_rates, values_of

import tristep
from tristep import Trainer, lr_scheduler
from tristep.trainer.optimizer import SGD, Optimizer


def test_a_new_rate_does_not_rescale_the_momentum(params, gradients):
    """The rate is folded into MXNet's momentum, unlike torch's."""
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    before = values_of(*params)
    for rate in (1.0, 0.1):
        trainer.set_learning_rate(rate)
        trainer.zero_grad()
        backward_with(params, gradients)
        trainer.step(1)
    for weight, old, gradient in zip(params, before, values_of(*gradients), strict=True):
        np.testing.assert_allclose(values_of(weight)[0], old - (1.0 + 0.5 * 1.0 + 0.1) * gradient, rtol=1e-5, atol=1e-6)


def test_a_scheduler_forbids_setting_the_rate(params):
    trainer = Trainer(params, "sgd", {"lr_scheduler": lr_scheduler.PolyScheduler(100, base_lr=0.4)})
    with pytest.raises(UserWarning, match="decided by PolyScheduler.*cannot be set to 0.1.*lr_scheduler = None first"):
        trainer.set_learning_rate(0.1)
    assert trainer.learning_rate == 0.4
    trainer.optimizer.lr_scheduler = None
    trainer.set_learning_rate(0.1)
    assert trainer.learning_rate == 0.1


def test_hyper_parameters_can_be_changed_between_steps(params, gradients, engine):
    trainer = Trainer(params, "sgd", (("learning_rate", 1.0),), engine=engine)  # pairs will do
    before, sums = values_of(*params), [0.0] * len(params)
    for wd, clip in ((0.0, None), (0.5, None), (0.0, 0.25), (0.0, -1.0)):
        trainer.optimizer.wd, trainer.optimizer.clip_gradient = wd, clip
        for i, (value, gradient) in enumerate(zip(values_of(*params), values_of(*gradients), strict=True)):
            limited = np.clip(gradient, -clip, clip) if clip and clip > 0 else gradient
            sums[i] = sums[i] - (limited + wd * value)
        trainer.zero_grad()
        backward_with(params, gradients)
        trainer.step(1)
    for weight, old, moved in zip(values_of(*params), before, sums, strict=True):
        np.testing.assert_allclose(weight, old + moved, rtol=1e-5, atol=1e-6)


def test_switching_momentum_on_creates_its_state(params, gradients):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    before = values_of(*params)
    for momentum in (0.0, 0.5, 0.5):
        trainer.optimizer.momentum = momentum
        trainer.zero_grad()
        backward_with(params, gradients)
        trainer.step(1)
    for weight, old, gradient in zip(params, before, values_of(*gradients), strict=True):
        np.testing.assert_allclose(values_of(weight)[0], old - (1 + 1 + 1.5) * gradient, rtol=1e-5, atol=1e-6)


def test_multipliers_of_parameters_are_read_at_every_step(params):
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0})
    assert one_step_rates(trainer, params) == pytest.approx([1, 1, 1], rel=1e-5)
    params[1].lr_mult = 0.25
    assert one_step_rates(trainer, params) == pytest.approx([1, 0.25, 1], rel=1e-5)
    params[1].lr_mult, params[2].lr_mult = 2.0, 0.0
    assert one_step_rates(trainer, params) == pytest.approx([1, 2, 0], rel=1e-5)
    del params[1].lr_mult, params[2].lr_mult
    assert one_step_rates(trainer, params) == pytest.approx([1, 1, 1], rel=1e-5)


def test_multipliers_of_unknown_parameters_are_refused():
    net = torch.nn.Linear(2, 1)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0})
    trainer.optimizer.set_lr_mult({"bias": 3.0, 0: 2.0})
    assert one_step_rates(trainer, list(net.parameters())) == pytest.approx([2, 3], rel=1e-5)
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
    assert one_step_rates(trainer, params) == pytest.approx([0.1, 1, 1], rel=1e-5)
    assert params[2].wd_mult == 0.0
    assert not vars(params[1])
    assert set(trainer.state_dict()["counts"]) == {"0.0", "head", "2.0"}


def test_names_decide_the_decay_where_they_are_given(device):
    """MXNet 1.9.1's rule, for names with underscores and, as torch writes them, with dots."""
    names = ["fc_weight", "fc_bias", "bn_gamma", "bn_beta", "fc.weight", "fc.bias"]
    params = [Parameter(torch.ones(3, device=device)) for _ in names]
    optimizer = SGD(learning_rate=1.0, wd=0.5, param_idx2name=dict(enumerate(names)))
    trainer = Trainer(params, optimizer)
    backward_with(params, [torch.zeros_like(param) for param in params])
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
    assert one_step_rates(trainer, order) == pytest.approx([1, 7, 1, 1])


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
    assert one_step_rates(trainer, [net.weight, net.bias]) == pytest.approx([1, 1], rel=1e-5)


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
    assert one_step_rates(trainer, [net[0], net[1]]) == [1, 1]
    assert list(trainer.optimizer.counts.values()) == [1, 1]


def test_a_parameter_in_two_groups_is_refused_as_by_torch():
    shared, other = Parameter(torch.zeros(2)), Parameter(torch.zeros(3))
    groups = [{"params": [shared, shared], "lr_mult": 0.5}, {"params": [other, shared], "lr_mult": 2.0}]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        torch.optim.SGD([{"params": [shared]}, {"params": [other, shared]}], lr=0.1)
    with pytest.raises(ValueError, match=r"more than one parameter group: '1.1' of params\[1\] is also in params\[0\]"):
        Trainer(groups, "sgd")
    assert not hasattr(shared, "lr_mult")
    Trainer(groups[:1], "sgd")  # twice in one group it is updated once
