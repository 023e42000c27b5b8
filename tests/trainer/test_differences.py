"""Differences from MXNet: docs/differences.md names a test for each, and those that no other file has are here."""

import ast
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from tristep import Trainer, lr_scheduler, optimizer, replicate
from tristep import init as initializer
from tristep.trainer.optimizer import (
    DCASGD,
    FTML,
    LAMB,
    LANS,
    LARS,
    LBSGD,
    NAG,
    SGD,
    SGLD,
    AdaBelief,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    GroupAdaGrad,
    Nadam,
    Optimizer,
    RMSProp,
    Signum,
    get_updater,
    registered,
    settings,
)
from tristep.trainer.optimizer import Test as AddingTest

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "differences.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0] != "What"]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_tables():
    assert len(ROWS) > 40
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_difference_has_a_reason_and_a_test_that_exists(row):
    assert len(row) == 5
    assert all(row)
    file, name = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", row[-1]).groups()
    functions = ast.parse((FOLDER / file).read_text(encoding="utf-8")).body
    assert name in [node.name for node in functions if isinstance(node, ast.FunctionDef)]


def test_the_tests_here_are_all_named_on_the_page():
    own = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    names = [node.name for node in own if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    of_the_page = ("test_the_page_has_tables", "test_each_difference", "test_the_tests_here")
    assert all(f"`{Path(__file__).name}::{name}`" in PAGE for name in names if not name.startswith(of_the_page))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_adamw_decays_when_gradients_are_multiplied_by_zero():
    weight, updater = torch.ones(3), get_updater(AdamW(learning_rate=0.5, wd=0.25, rescale_grad=0.0))
    updater(0, torch.full((3,), 7.0), weight)
    # The decay takes the bias-corrected rate.
    np.testing.assert_allclose(weight.numpy(), 1 - 0.5 * math.sqrt(0.001) / 0.1 * 0.25, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_of_16_bit_weights_are_float32(dtype, engine, device, monkeypatch):
    """A step of 2**-30 is no float16; after a million of them it would still be 0 there."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    updater = get_updater(SGD(learning_rate=2.0**-15, momentum=0.5))
    weight = torch.ones(3, dtype=dtype, device=device)
    for _ in range(2):
        updater(0, torch.full_like(weight, 2.0**-15), weight)
    (momentum,) = updater.states[0]
    assert momentum.dtype == torch.float32
    assert momentum.tolist() == [-1.5 * 2.0**-30] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(registered()))
def test_every_optimizer_trains_weights_of_every_type(name, dtype, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight = torch.full((5, 1), 3.0, dtype=dtype, device=device)
    rescale = -0.125 if name == "test" else 1.0  # which adds the gradient
    rate = 8.0 if name == "lars" else 0.125  # of which LARS takes a thousandth
    more = {"d0": 0.1} if name == "prodigy" else {}  # whose first steps are too small for 16 bits otherwise
    updater = get_updater(optimizer.create(name, learning_rate=rate, rescale_grad=rescale, **more))
    for _ in range(20):
        updater(0, weight.clone(), weight)  # the gradient of w**2 / 2
    assert weight.dtype == dtype
    assert (weight.abs() < 2.99).all()


def test_hyper_parameters_of_float64_weights_are_not_rounded(engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight = torch.ones(3, dtype=torch.float64, device=device)
    get_updater(SGD(learning_rate=0.1))(0, torch.ones_like(weight), weight)
    assert weight.tolist() == [1 - 0.1] * 3
    assert abs(0.1 - float(np.float32(0.1))) > 1e-9  # what rounding would have changed


def test_adamax_survives_gradients_of_zero(engine, device, monkeypatch):
    """MXNet 1.9.1 divides 0 by 0."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight, updater = torch.ones(3, device=device), get_updater(Adamax(learning_rate=0.5))
    updater(0, torch.tensor([0.0, 1.0, -2.0], device=device), weight)
    assert weight.tolist() == [1.0, pytest.approx(0.5), pytest.approx(1.5)]


def test_lans_survives_gradients_of_zero(engine, device, monkeypatch):
    """MXNet 2.0 divides them by their norm. As with LAMB, what is left of the direction is momentum and decay."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight, updater = torch.tensor([3.0, -4.0], device=device), get_updater(LANS(learning_rate=0.5))
    updater(0, torch.zeros_like(weight), weight)
    assert weight.tolist() == [3.0, -4.0]
    updater(0, torch.tensor([1.0, 2.0], device=device), weight)
    assert weight.isfinite().all()
    assert (weight < torch.tensor([3.0, -4.0], device=device)).all()
    weight, updater = torch.tensor([3.0, -4.0], device=device), get_updater(LANS(learning_rate=0.5, wd=0.1))
    updater(0, torch.zeros_like(weight), weight)  # the decay alone, as long as the weight by LANS's own ratio
    assert weight.tolist() == pytest.approx([1.5, -2.0], rel=1e-6)


def test_dcasgd_has_momentum(engine, device, monkeypatch):
    """delta = g + wd w + lamda g^2 (w - previous), in the momentum of SGD."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    start = np.linspace(-1, 1, 8)
    weight = torch.tensor(start, dtype=torch.float32, device=device)
    updater = get_updater(DCASGD(learning_rate=0.1, momentum=0.9, lamda=0.5, wd=0.2))
    w, previous, m = start, start, 0.0
    for g in np.sin(np.arange(32.0)).reshape(4, 8):
        updater(0, torch.tensor(g, dtype=torch.float32, device=device), weight)
        m = 0.9 * m - 0.1 * (g + 0.2 * w + 0.5 * g**2 * (w - previous))
        w, previous = w + m, w
    np.testing.assert_allclose(weight.cpu().numpy(), w, rtol=1e-5, atol=1e-6)


def _sgld_steps(seed=0, order=(0, 1), engine=None, steps=2):
    """Where two weights are after some steps, whose gradients are zero."""
    updater = get_updater(SGLD(learning_rate=0.25, seed=seed))
    updater.engine = engine
    weights = [torch.zeros(4), torch.zeros(3, 2)]
    for _ in range(steps):
        for i in order:
            updater(i, torch.zeros_like(weights[i]), weights[i])
    return torch.cat([weight.flatten() for weight in weights])


def test_the_noise_of_sgld_comes_from_its_seed_parameter_and_count_alone():
    torch.manual_seed(1)
    once = _sgld_steps()
    torch.manual_seed(2)
    assert torch.equal(_sgld_steps(order=(1, 0)), once)
    for engine in ("cpu", "eager", "triton"):
        torch.testing.assert_close(_sgld_steps(engine=engine), once, rtol=1e-5, atol=1e-6)
    others = [_sgld_steps(seed=1), _sgld_steps(steps=3)]
    assert all(not torch.isclose(other, once).any() for other in others)
    assert len(once.unique()) == len(once)


def test_lars_measures_the_master_copy():
    """Of 1 + 2**-12, float16 keeps only the 1. The trust ratio makes steps of |w|, whatever the gradient."""
    updater = get_updater(LARS(learning_rate=1.0, eta=1.0, multi_precision=True))
    weight = torch.ones(1).half()
    updater(0, torch.full((1,), 0.5).half(), weight)
    assert updater.masters[0].item() == 0.0
    weight.fill_(1.0)
    updater.masters[0].fill_(1 + 2.0**-12)
    updater(0, torch.full((1,), 0.5).half(), weight)
    assert updater.masters[0].item() == 0.0  # a step of 1 would leave 2**-12


def test_lars_corrects_the_momentum_of_all_parameters_of_a_step():
    """MXNet does it for the first four."""
    weights = [torch.ones(2) for _ in range(9)]
    made = LARS(learning_rate=1.0, eta=1.0, momentum=0.5)
    updater = get_updater(made)
    for rate in (1.0, 0.5):
        made.set_learning_rate(rate)
        updater(list(range(9)), [torch.ones(2)] * 9, weights)
    # After the first step, of |w| / |g| = 1, weights are 0 and so scale no more.
    assert [weight.tolist() for weight in weights] == [[-(0.5 * 0.5 * 1 + 0.5)] * 2] * 9


def test_lbsgd_keeps_its_sum_of_gradients_with_the_state():
    trainer = Trainer([("w", Parameter(torch.zeros(2)))], "lbsgd", {"learning_rate": 1.0, "batch_scale": 2})
    trainer._params[0].grad = torch.ones(2)
    trainer.step(4)
    assert trainer.state_dict()["state"]["w"]["total"].tolist() == [0.25] * 2
    trainer._params[0].grad = torch.ones(2)
    trainer.step(1)  # of the mean, 0.625, at a rate that the warm-up has raised a little
    assert trainer._params[0].tolist() == [pytest.approx(-(1 + 2 / 160) * 0.625)] * 2


def test_the_optimizer_for_tests_counts():
    trainer = Trainer([Parameter(torch.ones(2))], AddingTest())
    trainer._params[0].grad = torch.ones(2)
    trainer.step(2)
    assert trainer.optimizer.num_update == 1
    assert trainer._params[0].tolist() == [1.5] * 2


def test_a_rate_given_to_ftrl_with_a_schedule_holds():
    schedule = lr_scheduler.FactorScheduler(10, base_lr=0.5)
    with pytest.warns(UserWarning, match="learning_rate=0.2 replaces base_lr=0.5"):
        assert Ftrl(learning_rate=0.2, lr_scheduler=schedule).learning_rate == 0.2


@pytest.mark.parametrize("name", sorted(registered()))
def test_no_update_changes_the_gradient(name, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    updater = get_updater(optimizer.create(name, rescale_grad=0.5, clip_gradient=0.25))
    weight, gradient = (torch.randn(4, 3, device=device) for _ in range(2))
    before = gradient.clone()
    for _ in range(2):
        updater(0, gradient, weight)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("make", [Ftrl, FTML])
def test_a_rate_of_zero_is_refused_where_it_divides(make, everything):
    params = {"a": Parameter(torch.ones(3)), "b": Parameter(torch.ones(3))}
    trainer = Trainer(params, make())
    for _ in range(2):
        for param in params.values():
            param.grad = torch.ones(3)
        if "lr_mult" in vars(params["b"]):
            break
        trainer.step(1)
        params["b"].lr_mult = 0.0
    before = everything(trainer, params.values())
    with pytest.raises(ValueError, match=f"a learning rate of 0, by schedule or lr_mult: {make.__name__} divides by it"):
        trainer.step(1)
    assert everything(trainer, params.values()) == before


def test_a_schedule_that_gives_no_rate_is_refused(everything):
    given = [1.0, math.nan, -0.5, math.inf, "fast", None, torch.ones(1)]
    weight = Parameter(torch.ones(3))
    trainer = Trainer([weight], "sgd", {"lr_scheduler": lambda num_update: given[num_update - 1]})
    weight.grad = torch.ones(3)
    trainer.step(1)
    for wrong in given[1:]:
        given[1] = wrong
        weight.grad = torch.ones(3)
        before = everything(trainer, [weight])
        with pytest.raises((ValueError, TypeError), match=r"lr_scheduler\(2\)=.*: must be"):
            trainer.step(1)
        assert everything(trainer, [weight]) == before


# ---- initializers ----------------------------------------------------------------------------------------------------


def test_a_module_is_filled_as_often_as_asked():
    net = torch.nn.Linear(2, 2)
    for value in (1.0, 2.0):
        initializer.initialize(net, initializer.Constant(value))
        assert net.weight.tolist() == [[value] * 2] * 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [("upsampling0_weight", 7.0), ("stn_loc_weight", 7.0), ("stn_loc_bias", 0.0), ("bn_moving_var", 1.0)],
)
def test_a_plain_name_is_as_good_as_a_description(name, expected):
    """MXNet makes the first bilinear, the second zeros, and the third 1, 0, 0, 0, 1, 0; and warns each time."""
    for given in (name, initializer.InitDesc(name)):
        values = torch.full((6,), 9.0)
        initializer.Constant(7)(given, values)
        assert values.tolist() == [expected] * 6


@pytest.mark.parametrize(("kind", "rows", "columns"), [("i2h", 6, 3), ("h2h", 6, 2)])
def test_rnnfused_hands_on_matrices(kind, rows, columns):
    """One GRU of 2 on inputs of 3. The bound of Glorot and Bengio needs both sides of a matrix."""
    others = {"i2h_weight_initializer": "zeros", "h2h_weight_initializer": "zeros"}
    rule = initializer.RNNFused("gru", 1, 2, **others | {f"{kind}_weight_initializer": "xavier"})
    bound = math.sqrt(6 / (rows + columns))
    largest = 0.0
    for _ in range(50):
        vector = torch.full((6 * 3 + 6 * 2 + 6 + 6,), 9.0)
        rule("rnn_weight", vector)
        drawn = vector[:18] if kind == "i2h" else vector[18:30]
        assert vector.count_nonzero() == drawn.count_nonzero() == rows * columns
        largest = max(largest, drawn.abs().max().item())
    assert 0.95 * bound < largest <= bound


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_counts_go_with_the_parameter_to_another_device():
    """In MXNet t starts again, and num_update stands still until the new counts overtake it."""
    trainer = Trainer(
        [Parameter(torch.ones(3))], "adam", {"lr_scheduler": lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}
    )
    trainer._params[0].grad = torch.ones(3)
    for _ in range(3):
        trainer._params[0].grad.add_(1.0)
        trainer.step(1)
    other = Trainer([Parameter(torch.ones(3, device="meta"))], "adam")
    other.load_state_dict(trainer.state_dict())
    assert other.state_dict()["state"]["0"]["mean"].device.type == "meta"
    for n in (4, 5):
        other._params[0].grad = torch.ones(3, device="meta")
        other.step(1)
        assert other.optimizer.num_update == n
        assert other.optimizer.counts == {0: n}
    assert other.learning_rate == 0.1 * 0.5**2


# ---- writing optimizers ----------------------------------------------------------------------------------------------


def test_the_first_argument_is_the_learning_rate():
    kin_of_sgd, kin_of_adam = (SGD, NAG, SGLD, Signum, DCASGD), (Adam, AdamW, Adamax, AdaBelief, Nadam, FTML)
    for make in (*kin_of_sgd, *kin_of_adam, AdaGrad, GroupAdaGrad, RMSProp, LARS, LAMB, LANS, LBSGD):
        assert make(0.75).learning_rate == 0.75
    assert Ftrl(0.75).lamda1 == optimizer.AdaDelta(0.75).rho == 0.75  # as in 1.9.1


@pytest.fixture
def warned(monkeypatch):
    """As if nothing had been warned of yet, which is done once in a process."""
    monkeypatch.setattr(settings, "_warned", set())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (SGD, "momentum"),
        (NAG, "momentum"),
        (DCASGD, "momentum"),
        (LARS, "momentum"),
        (LBSGD, "momentum"),
        (AdaGrad, "eps"),
        (GroupAdaGrad, "eps"),
        (FTML, "beta1"),
    ],
)
def test_a_first_argument_without_a_name_is_warned_of_once(make, name, warned, recwarn):
    with pytest.warns(UserWarning, match=rf"of {make.__name__} is learning_rate; in MXNet 1.9.1 it is {name}: write"):
        make(0.5)
    make(0.5)
    make(learning_rate=0.5)
    make(**{name: 0.5})
    assert not recwarn.list
    assert next(iter(inspect.signature(make).parameters)) == "learning_rate"


@pytest.mark.parametrize("make", [Adam, Adamax, Nadam, RMSProp, Signum, LAMB, AdamW, AdaBelief, LANS])
def test_a_default_rate_that_mxnet_prefers_to_the_schedule_is_warned_of_once(make, warned, recwarn):
    def schedule(rate):
        return lr_scheduler.FactorScheduler(2, 0.5, base_lr=rate)

    own = make().lr
    with pytest.warns(
        UserWarning, match=f"{make.__name__} without a learning_rate keeps base_lr=0.25 .*learning_rate={own} for"
    ):
        assert make(lr_scheduler=schedule(0.25)).learning_rate == 0.25
    make(lr_scheduler=schedule(0.25))
    make(learning_rate=0.25, lr_scheduler=schedule(0.25))
    make(lr_scheduler=schedule(own))
    make(lr_scheduler=lambda number: 0.25)
    SGD(lr_scheduler=schedule(0.25))
    assert not recwarn.list


@pytest.mark.parametrize("copies", [1, 2])
def test_a_missing_zero_grad_is_warned_of_once(copies, recwarn):
    def trained(before, grad_req=None, **arguments):
        nets = replicate(torch.nn.Linear(2, 1), ["cpu"] * copies)
        if grad_req is not None:
            for param in nets[0].parameters():
                param.grad_req = grad_req
        trainer = Trainer(nets if copies > 1 else nets[0], "sgd", **arguments)
        for _ in range(4):
            before(trainer, nets)
            for net in nets:
                net(torch.ones(1, 2)).sum().backward()
            trainer.step(1)
            assert len(nets[0].weight._post_accumulate_grad_hooks or ()) <= 1
        assert not nets[0].weight._post_accumulate_grad_hooks

    def by_hand(trainer, nets):
        for net in nets:
            net.zero_grad(set_to_none=False)

    def twice(trainer, nets):
        trainer.zero_grad(set_to_none=False)
        for net in nets:
            net(torch.ones(1, 2)).sum().backward()

    trained(lambda trainer, nets: trainer.zero_grad())
    trained(by_hand)
    trained(twice)
    trained(lambda trainer, nets: None, zero_grads=True)
    trained(lambda trainer, nets: None, grad_req="add")
    assert not recwarn.list
    with pytest.warns(
        UserWarning, match="has added to the gradients of the step before.* in MXNet it replaces them"
    ) as found:
        trained(lambda trainer, nets: None)
    assert len(found) == 1


def test_lbsgd_asks_a_schedule_for_all_parameters_before_it_counts():
    """MXNet, which counts parameter by parameter, asks for all but the first one number later."""
    weights = [Parameter(torch.zeros(1)) for _ in range(2)]
    trainer = Trainer(weights, "lbsgd", {"lr_scheduler": lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0)})
    for rate in (1.0, 1.0, 0.5):  # of the numbers 0, 1, 2
        before = [weight.item() for weight in weights]
        for weight in weights:
            weight.grad = torch.ones(1)
        trainer.step(1)
        assert [old - weight.item() for old, weight in zip(before, weights, strict=True)] == [rate, rate]


def test_arguments_of_the_base_class_are_given_by_name():
    parameters = list(inspect.signature(Optimizer).parameters.values())
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    with pytest.raises(TypeError, match="positional arguments"):
        SGD(0.1, 0.9, True, 1.0)
    with pytest.raises(TypeError, match="SGD has no argument 'sym'"):
        SGD(sym=None)


def test_states_are_tuples_and_masters_are_kept_apart():
    updater = get_updater(SGD(multi_precision=True))
    other = get_updater(Adam(multi_precision=True))
    for each in (updater, other):
        each(0, torch.ones(2).half(), torch.ones(2).half())
        assert each.masters[0].dtype == torch.float32
    assert updater.states == {0: ()}
    assert [state.tolist() for state in other.states[0]] == [
        [pytest.approx(0.1)] * 2,
        [pytest.approx(0.001)] * 2,
    ]


def test_an_updater_has_no_pickles():
    updater = get_updater(SGD())
    assert not hasattr(updater, "get_states")
    assert not hasattr(updater, "set_states")
