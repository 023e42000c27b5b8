"""Trainings side by side: each must be what it is alone, to the bit, by an `Updater` and a `Plan` of its own."""

import copy

import numpy as np
import pytest
import torch

from tristep import optimizer
from tristep.kernels import rules
from tristep.trainer import Ensemble
from tristep.trainer.ensemble import make_optimizer
from tristep.trainer.lr_scheduler import CosineScheduler, FactorScheduler
from tristep.trainer.optimizer.plan import StepPlan
from tristep.trainer.optimizer.updater import Updater

SHAPES = ((5, 3), (7,), (4, 4))
RATES = (0.1, 0.01, 0.1, 0.003)
NAMES = [name for name in optimizer.registered() if optimizer.registered()[name].__module__.startswith("tristep")]


def shapes_for(name):
    return [shape for shape in SHAPES if len(shape) == 2] if name == "groupadagrad" else SHAPES


def both(make, shapes=SHAPES, steps=5, engine=None, dtype=torch.float32, gradients=None, device="cpu", stacked=False):
    """`Ensemble` and single plans after the same steps, and the weights of both.

    Stacked weights of the second shape begin at multiples of 4 bytes only.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    optimizers, others = make(), make()
    together = [[weight.clone() for weight in start] for _ in optimizers]
    apart = [[weight.clone() for weight in start] for _ in optimizers]
    stacks = [torch.stack(each) for each in zip(*together, strict=True)]
    if stacked:
        together, apart = ([list(row) for row in zip(*each, strict=True)] for each in (stacks, map(torch.clone, stacks)))
    many = Ensemble(optimizers, stacks, engine, stacked=True) if stacked else Ensemble(optimizers, together, engine)
    updaters = [Updater(each, engine) for each in others]
    plans = [StepPlan(updater, list(range(len(start))), weights) for updater, weights in zip(updaters, apart, strict=True)]
    for t in range(steps):
        given = [[torch.randn(s, generator=generator).to(device, dtype) for s in shapes] for _ in optimizers]
        given = given if gradients is None else gradients(t, given)
        if stacked:  # places without a gradient lack those of all trainings
            columns = zip(*given, strict=True)
            many.step([None if any(each is None for each in column) else torch.stack(column) for column in columns])
        else:
            many.step(given)
        for plan, grads in zip(plans, given, strict=True):
            plan.step(grads)
    return many, together, plans, apart


def assert_equal(many, together, plans, apart):
    """All weights, states, masters, counts and what is carried on."""
    for i, plan in enumerate(plans):
        for ours, theirs in zip(together[i], apart[i], strict=True):
            assert torch.equal(ours, theirs)
        ours, theirs = many.updaters[i], plan.updater
        for k in range(len(apart[i])):
            for a, b in zip(ours.states[k], theirs.states[k], strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
        assert ours.masters.keys() == theirs.masters.keys()
        assert all(torch.equal(ours.masters[k], theirs.masters[k]) for k in ours.masters)
        assert ours.optimizer.counts == theirs.optimizer.counts
        assert ours.optimizer.num_update == theirs.optimizer.num_update
        if isinstance(ours.optimizer, optimizer.RuleOptimizer):
            assert ours.optimizer.host_state() == theirs.optimizer.host_state()


def rated(name, rates=RATES, **arguments):
    takes_rate = name != "adadelta"
    return lambda: [optimizer.create(name, **({"learning_rate": r} if takes_rate else {}), **arguments) for r in rates]


@pytest.mark.sample(16)
@pytest.mark.sample(4, "triton")
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_as_alone(name, engine, device):
    steps = 2 if engine == "triton" and device.type == "cpu" else 5
    assert_equal(*both(rated(name), shapes_for(name), steps, engine, device=device))


@pytest.mark.sample(3, "triton")
@pytest.mark.sample(10)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_stacked_as_alone(name, engine, device):
    steps = 2 if engine == "triton" and device.type == "cpu" else 5
    assert_equal(*both(rated(name), shapes_for(name), steps, engine, device=device, stacked=True))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", NAMES)
def test_other_settings_that_differ(name):
    """All numbers of the constructor that can be made a little smaller, and the decay."""
    own = vars(optimizer.create(name))

    def make():
        made = []
        for factor in (1.0, 0.9, 0.7):
            arguments = {}
            for key in (
                "beta1",
                "beta2",
                "beta3",
                "momentum",
                "epsilon",
                "eps",
                "gamma1",
                "rho",
                "alpha",
                "lamda",
                "beta",
                "eta",
            ):
                if isinstance(own.get(key), float) and own[key]:
                    arguments[key] = own[key] * factor
            try:
                made.append(optimizer.create(name, wd=0.01 * factor, **arguments))
            except (TypeError, ValueError):
                made.append(optimizer.create(name, **arguments))
        return made

    assert_equal(*both(make, shapes_for(name), 4))


OPTIONS = [
    {"clip_norm": 0.5},
    {"cautious": True},
    {"lookahead": 2},
    {"ema_decay": 0.9},
    {"decoupled_wd": True, "wd": 0.1},
    {"skip_nonfinite": True},
    {"clip_gradient": 0.3, "rescale_grad": 0.5},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "bfloat16", "stochastic_rounding": True},
    {"lookahead": 3, "ema_decay": 0.5, "cautious": True},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
@pytest.mark.parametrize("name", ["adam", "nag", "nadam"])
def test_options_as_alone(name, options, stacked):
    options = {"momentum": 0.9} | options if name == "nag" else options
    if name == "nag" and options.get("state_dtype") and "momentum" not in options:
        pytest.skip("no states")
    assert_equal(*both(rated(name, **options), steps=7, stacked=stacked))


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_packed_states_as_alone(stacked):
    assert_equal(*both(rated("adam", state_dtype="8bit"), shapes=((64, 80), (7,)), steps=3, stacked=stacked))


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("options", [{"multi_precision": True}, {"multi_precision": "remainder"}, {"kahan": True}], ids=str)
def test_16_bits_as_alone(options, stacked):
    many, *others = both(rated("adamw", **options), dtype=torch.bfloat16, stacked=stacked)
    assert_equal(many, *others)
    assert many.updaters[0].masters


def schedules():
    kinds = [
        {"lr_scheduler": CosineScheduler(max_update=6, base_lr=0.1, final_lr=0.001, warmup_steps=2)},
        {"lr_scheduler": FactorScheduler(step=2, factor=0.5, base_lr=0.05)},
        {"learning_rate": 0.02},
    ]
    return [optimizer.create("adam", **arguments) for arguments in kinds]


def test_schedules_as_alone():
    many, *others = both(schedules, steps=9)
    assert_equal(many, *others)
    assert many.launches == 1


@pytest.mark.parametrize("name", ["lbsgd", "schedulefreesgd", "lars", "ftrl"])
def test_schedules_where_rates_are_carried_on(name):
    def make():
        return [
            optimizer.create(name, lr_scheduler=CosineScheduler(max_update=9, base_lr=rate, final_lr=0.01)) for rate in RATES
        ]

    assert_equal(*both(make, steps=6))


def test_multipliers_as_alone():
    def make():
        made = rated("adamw", wd=0.1)()
        for each in made:
            each.set_lr_mult({1: 0.5})
            each.set_wd_mult({0: 0.0})
        made[2].set_lr_mult({0: 3.0})  # which therefore is a group of its own
        return made

    many, *others = both(make)
    assert_equal(many, *others)
    assert many.launches == 2


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_kinds_side_by_side(stacked):
    """Different rules, one of whole tensors, one by hand, one that looks at all tensors."""

    class ByHand(optimizer.Optimizer):
        def create_state(self, index, weight):
            return torch.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            state.mul_(0.9).add_(grad)
            weight.sub_(self._get_lr(index) * state)

    def make():
        names = ("adam", "sgd", "muon", "prodigy", "adam", "sgd", "sgd")
        made = [optimizer.create(name, learning_rate=0.01 * (i + 1)) for i, name in enumerate(names)]
        return [*made, ByHand(learning_rate=0.1)]

    many, together, _, apart = both(make, ((4, 3), (8,), (4, 4)), stacked=stacked)
    assert many.launches == 4
    for ours, theirs in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["sparse", "missing"])
def test_gradients_that_cannot_be_taken_together(kind):
    def change(t, gradients):
        if t == 2:
            gradients[1][0] = None if kind == "missing" else gradients[1][0].to_sparse(1)
        return gradients

    many, *others = both(rated("sgd", momentum=0.9), gradients=change)
    assert_equal(many, *others)


def test_a_stack_without_gradients():
    def change(t, gradients):
        return [[one, None if t == 2 else two, three] for one, two, three in gradients]

    many, *others = both(rated("sgd", momentum=0.9), gradients=change, stacked=True)
    assert_equal(many, *others)


@pytest.mark.parametrize("steps", [3, 300])
def test_rows_of_coming_steps_are_those_of_single_steps(steps):
    """Bias corrections are computed for many steps at once; a schedule, and a branch in user code, forbid that."""

    class Late(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": lr if t < 40 else 0.5 * lr}

    class Slower(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": lr / t}

    def make():
        made = [optimizer.Adam(rate) for rate in RATES] + [optimizer.AdamW(rate, wd=0.1) for rate in RATES]
        made += [optimizer.Adam(0.1, beta1=beta, beta2=0.9 + 0.1 * beta) for beta in (0.5, 0.7, 0.9)]
        made += [kind(learning_rate=rate) for kind in (Late, Slower) for rate in RATES]
        return [*made, optimizer.Adam(lr_scheduler=FactorScheduler(step=2, factor=0.5, base_lr=0.05))]

    assert_equal(*both(make, ((2,),), steps, stacked=True))


def test_stacks_of_trainings_in_turns_are_taken_apart():
    """Those of one kind are no slice of a stack where two kinds take turns unevenly."""
    kinds = ("adam", "adam", "sgd", "adam", "sgd")

    def make():
        return [optimizer.create(kind, learning_rate=0.01 * (i + 1)) for i, kind in enumerate(kinds)]

    many, *others = both(make, ((4,), (2, 2)), stacked=True)
    assert_equal(many, *others)
    assert many.launches == 2


def test_stacked_bad_input():
    made = rated("sgd", (0.1, 0.2))()
    with pytest.raises(ValueError, match=r"weights\[0\] is \(3, 2\): must be \[2, \.\.\.\]"):
        Ensemble(made, [torch.ones(3, 2)], stacked=True)
    with pytest.raises(TypeError, match=r"weights\[0\] must be a tensor.*got list"):
        Ensemble(made, [[torch.ones(2), torch.ones(2)]], stacked=True)
    with pytest.raises(ValueError, match=r"is empty"):
        Ensemble(made, [], stacked=True)
    many = Ensemble(made, [torch.ones(2, 2)], stacked=True)
    with pytest.raises(ValueError, match="2 stacks of gradients for 1"):
        many.step([torch.ones(2, 2), torch.ones(2, 2)])
    with pytest.raises(ValueError, match=r"gradients\[0\] is \(2, 3\): must be \(2, 2\)"):
        many.step([torch.ones(2, 3)])


def test_weights_that_have_moved():
    weights = [[torch.ones(4)], [torch.ones(4)]]
    many = Ensemble(rated("sgd", (0.5, 0.25))(), weights)
    gradients = [[torch.ones(4)], [torch.ones(4)]]
    many.step(gradients)
    for (weight,) in weights:
        weight.data = weight.data.clone()
    many.step(gradients)
    assert [weight.tolist() for (weight,) in weights] == [[0.0] * 4, [0.5] * 4]


def test_the_same_gradients_with_other_numbers():
    weights, gradients = [[torch.zeros(2)], [torch.zeros(2)]], [[torch.ones(2)], [torch.ones(2)]]
    many = Ensemble(rated("sgd", (1.0, 2.0))(), weights)
    with pytest.raises(RuntimeError, match="there was none"):
        many.step()
    many.step(gradients)
    for (gradient,) in gradients:
        gradient.fill_(10.0)
    many.step()
    assert [weight.tolist() for (weight,) in weights] == [[-11.0, -11.0], [-22.0, -22.0]]


@pytest.mark.parametrize("options", [{}, {"lookahead": 2, "ema_decay": 0.9}, {"schedule": True}, {"wd": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["adam", "lamb", "muon", "nadam", "rmsprop", "schedulefreesgd", "sgd", "sgld"])
def test_steps_one_after_the_other_are_those_of_step(name, options):
    """The second way is `step`, which the tests above compare with optimizers by themselves."""
    if name == "muon" and "lookahead" in options:
        pytest.skip("of single elements only")

    def run(repeated):
        made = rated(name, **{k: v for k, v in options.items() if k != "schedule"})()
        if options.get("schedule"):
            for each, rate in zip(made, RATES, strict=True):
                each.lr_scheduler = CosineScheduler(max_update=6, base_lr=rate)
        weights = torch.linspace(-1, 1, 4 * 6).reshape(4, 3, 2).clone()
        given = torch.empty(4, 3, 2)
        many = Ensemble(made, [[row] for row in weights])
        taken = many.steps()
        for t in range(7):
            torch.cos((t + 1) * weights, out=given)
            if t == 0 or not repeated:
                many.step([[row] for row in given] if t == 0 else None)
            else:
                next(taken)
        taken.close()
        carried = [each.host_state() for each in made]
        return weights, [many.updaters[i].states[0] for i in range(4)], [each.counts for each in made], carried

    one, other = run(False), run(True)
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(a, b) for x, y in zip(one[1], other[1], strict=True) for a, b in zip(x, y, strict=True))
    assert one[2:] == other[2:]
    assert one[2][0] == {0: 7}


def test_autograd_and_optimizers_know_of_steps_when_these_end():
    weight, gradient, own = torch.ones(2, requires_grad=True), torch.ones(2), optimizer.SGD(0.5)
    many = Ensemble([own], [[weight]])
    with pytest.raises(RuntimeError, match="there was none"):
        next(many.steps())
    many.step([[gradient]])
    taken = many.steps()
    next(taken)
    squares = (weight * weight).sum()
    next(taken)
    taken.close()
    assert own.num_update == 3
    assert weight.tolist() == [-0.5, -0.5]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_rows_that_do_not_use_the_update_count_are_computed_once():
    asked = []

    class Plain(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            asked.append(t)
            return {"lr": 0.5 * lr}

    class Late(Plain):
        def hyper(self, t, lr, wd):
            return super().hyper(t, lr, wd) if t > 2 else {}

    class First(Plain):
        def hyper(self, t, lr, wd):
            return super().hyper(t, lr, wd) | ({"wd": 0.5} if t == 1 else {})

    for kind, more in ((Plain, 0), (Late, 4), (First, 4)):
        many, *others = both(lambda kind=kind: [kind(learning_rate=rate) for rate in RATES], steps=2)
        assert_equal(many, *others)
        asked.clear()
        for _ in range(4):
            many.step()
        assert len(asked) == more


def test_a_class_that_cannot_compute_with_arrays():
    """Branches and functions of `math` refuse arrays; results that differ must be noticed."""

    class Branching(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": lr if lr > 0.05 else 2 * lr}

    class Wrong(optimizer.RuleOptimizer):
        rule = rules.sgd

        def hyper(self, t, lr, wd):
            return {"lr": float(np.max(lr))}

    for kind in (Branching, Wrong):
        many, *others = both(lambda kind=kind: [kind(learning_rate=rate) for rate in RATES])
        assert_equal(many, *others)
        assert many.launches == 1


def test_nothing_has_changed_where_an_optimizer_refuses():
    weights = [[torch.ones(3)] for _ in range(4)]
    optimizers = [
        optimizer.Nadam(0.1),
        optimizer.Nadam(0.2),
        optimizer.Ftrl(lr_scheduler=lambda t: 0.1 if t < 2 else 0.0),
        optimizer.Ftrl(learning_rate=0.5),
    ]
    many = Ensemble(optimizers, weights)
    gradients = [[torch.ones(3)] for _ in range(4)]
    many.step(gradients)
    before, carried = copy.deepcopy(weights), [each.host_state() for each in optimizers]
    with pytest.raises(ValueError, match="a learning rate of 0"):
        many.step(gradients)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(before, weights, strict=True))
    assert [each.host_state() for each in optimizers] == carried
    assert [each.num_update for each in optimizers] == [1] * 4
    optimizers[2].lr_scheduler = None
    many.step(gradients)  # and goes on as if nothing had been
    alone = torch.ones(3)
    own = optimizer.Nadam(0.1)
    plan = StepPlan(Updater(own), [0], [alone])
    plan.step([torch.ones(3)])
    plan.step([torch.ones(3)])
    assert torch.equal(weights[0][0], alone)


def test_bad_input():
    sgd = optimizer.SGD(0.1)
    with pytest.raises(ValueError, match="2 optimizers for weights of 1"):
        Ensemble([sgd, optimizer.SGD(0.1)], [[torch.ones(1)]])
    with pytest.raises(ValueError, match="there twice"):
        Ensemble([sgd, sgd], [[torch.ones(1)], [torch.ones(1)]])
    with pytest.raises(ValueError, match=r"weights\[0\] is empty"):
        Ensemble([sgd], [[]])
    with pytest.raises(TypeError, match="must be an Optimizer"):
        Ensemble(["sgd"], [[torch.ones(1)]])
    many = Ensemble([sgd, optimizer.SGD(0.2)], [[torch.ones(1)], [torch.ones(1)]])
    with pytest.raises(ValueError, match="gradients of 1 trainings for 2"):
        many.step([[torch.ones(1)]])
    with pytest.raises(ValueError, match=r"gradients\[1\] are 2, weights 1"):
        many.step([[torch.ones(1)], [torch.ones(1), torch.ones(1)]])
    with pytest.raises(ValueError, match=r"weights\[1\]\[0\]"):
        many.step([[torch.ones(1)], [torch.ones(2)]])


def test_make_optimizer_copies_schedules():
    schedule = FactorScheduler(step=2, base_lr=0.5)
    one, two = (make_optimizer("sgd", {"lr_scheduler": schedule, "learning_rate": rate}) for rate in (0.1, 0.2))
    assert (one.rate_at(1), two.rate_at(1), schedule.base_lr) == (0.1, 0.2, 0.5)
    with pytest.raises(TypeError, match="has no base_lr"):
        make_optimizer("sgd", {"lr_scheduler": lambda t: 0.1, "learning_rate": 0.1})


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "lion", "rmsprop"])
def test_a_restart_gives_the_same_weights_as_at_first(name):
    starts = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weights = starts.clone()
    together = Ensemble([optimizer.create(name, learning_rate=rate) for rate in (0.1, 0.2, 0.3)], [[row] for row in weights])
    given, found = torch.empty(3, 5), []
    for turn in range(3):
        weights.copy_(starts)
        assert turn == 0 or together.restart()
        for step in range(4 + turn):  # the later ones go on where the first have stopped
            given.copy_(weights.cos())
            together.step([[row] for row in given] if step == 0 else None)
            if step == 3:
                found.append(weights.clone())
        assert [each.num_update for each in together.optimizers] == [4 + turn] * 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_schedule_cannot_be_restarted():
    schedules = [FactorScheduler(1, 0.5, base_lr=rate) for rate in (0.1, 0.2)]
    weights = [torch.ones(2), torch.ones(2)]
    together = Ensemble([optimizer.SGD(lr_scheduler=each) for each in schedules], [[weight] for weight in weights])
    together.step([[torch.ones(2)], [torch.ones(2)]])
    assert not together.restart()
    assert together.optimizers[0].num_update == 1
