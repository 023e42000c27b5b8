"""Every option of an optimizer on every way to step: weights and states are those of `Trainer.step`, or it is refused.

Gradients are the same numbers on every path: where replicas or ranks add theirs up, all but the first have zeros.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tristep
from tristep import Trainer, lr_scheduler, optimizer
from tristep.kernels import rules

STEPS = 5
ENGINE = "eager"
SHAPES = {"a_weight": (4, 3), "b_gamma": (4,), "c_weight": (2, 4), "d_bias": (2,)}
WIDE, NARROW = torch.float32, torch.bfloat16


class OwnRule(optimizer.RuleOptimizer):
    """As a user's: a rule with momentum, and a hyper-parameter that depends on the update count."""

    rule = rules.sgd_momentum
    couples_wd = True

    def __init__(self, learning_rate=None, **kwargs):
        self.momentum = 0.9
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t, lr, wd):
        return {"momentum": 1.0 - 1.0 / (t + 1.0)}


class ByHand(optimizer.Optimizer):
    """As a user's from MXNet, in plain torch."""

    def create_state(self, index, weight):
        return torch.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        grad = grad * self.rescale_grad + self._get_wd(index) * weight
        if self.clip_gradient is not None:
            grad = grad.clamp(-self.clip_gradient, self.clip_gradient)
        state.mul_(0.9).add_(grad)
        weight.sub_(self._get_lr(index) * state)


OPTIMIZERS = {
    "sgd": (optimizer.SGD, {"learning_rate": 0.1, "momentum": 0.9}),
    "nag": (optimizer.NAG, {"learning_rate": 0.1, "momentum": 0.9}),
    "adamw": (optimizer.AdamW, {"learning_rate": 0.05}),
    "lamb": (optimizer.LAMB, {"learning_rate": 0.05}),
    "lars": (optimizer.LARS, {"learning_rate": 0.5, "momentum": 0.9, "eta": 0.1}),
    "lion": (optimizer.Lion, {"learning_rate": 0.05}),
    "nadam": (optimizer.Nadam, {"learning_rate": 0.05}),
    "signum": (optimizer.Signum, {"learning_rate": 0.02, "momentum": 0.9}),
    "own rule": (OwnRule, {"learning_rate": 0.1}),
    "muon": (optimizer.Muon, {"learning_rate": 0.05}),
    "by hand": (ByHand, {"learning_rate": 0.1}),
}


TORCHS = {"wd": "weight_decay"}


def schedule(rate):
    return lr_scheduler.FactorScheduler(step=1, factor=0.8, base_lr=rate)


def schedules(_):
    """Of a limit, and of decay, which starts from the decay that is given."""
    limit = lr_scheduler.ExponentialScheduler(factor=0.7, base_lr=0.5)
    return {"wd": lr_scheduler.FactorScheduler(step=1, factor=0.5), "clip_gradient": limit}


DECAY = {"wd": 0.1, "decoupled_wd": True}
MANY = {
    **DECAY,
    "clip_gradient": 0.5,
    "cautious": True,
    "cautious_wd": True,
    "lookahead": 2,
    "ema_decay": 0.9,
    "rescale_grad": 0.5,
    "lr_scheduler": schedule,
    "begin_num_update": 2,
    "multipliers": True,
}
# By name: arguments of the optimizer, and the type of weights and gradients. "multipliers" are set on the parameters.
OPTIONS = {
    "nothing": ({}, WIDE),
    "wd": ({"wd": 0.1}, WIDE),
    "clip_gradient": ({"clip_gradient": 0.3}, WIDE),
    "rescale_grad": ({"rescale_grad": 0.5}, WIDE),
    "begin_num_update": ({"begin_num_update": 3}, WIDE),
    "lr_scheduler": ({"lr_scheduler": schedule, "wd": 0.1}, WIDE),
    "schedules": ({"schedules": schedules, "lr_scheduler": schedule, "wd": 0.1}, WIDE),
    "multipliers": ({"multipliers": True, "wd": 0.1}, WIDE),
    "clip_norm": ({"clip_norm": 0.5}, WIDE),
    "agc": ({"agc": 0.05}, WIDE),
    "skip_norm": ({"skip_norm": 4.0}, WIDE),
    "skip_nonfinite": ({"skip_nonfinite": True}, WIDE),
    "cautious": ({"cautious": True, "wd": 0.1}, WIDE),
    "decoupled_wd": (DECAY, WIDE),
    "cautious_wd": ({**DECAY, "cautious_wd": True}, WIDE),
    "lookahead": ({"lookahead": 2}, WIDE),
    "ema_decay": ({"ema_decay": 0.9}, WIDE),
    "state_dtype": ({"state_dtype": "bfloat16"}, WIDE),
    "state_device": ({"state_device": "cpu"}, WIDE),
    "stochastic_rounding": ({"stochastic_rounding": True, "rounding_seed": 3}, NARROW),
    "multi_precision": ({"multi_precision": True}, NARROW),
    "split master": ({"multi_precision": "remainder"}, NARROW),
    "split master of 24 bits": ({"multi_precision": "split8", "stochastic_rounding": True}, NARROW),
    "those of matrices": ({**DECAY, "cautious_wd": True, "ema_decay": 0.9, "clip_norm": 0.5, "skip_nonfinite": True}, WIDE),
    "many": (MANY, WIDE),
    "many with norms": ({**MANY, "clip_norm": 0.5, "skip_nonfinite": True, "agc": 0.05}, WIDE),
}


class Case:
    """A network and its optimizer, with gradients that are given: the loss is linear in each parameter."""

    def __init__(self, name, option):
        self.klass, arguments = OPTIMIZERS[name]
        options, self.dtype = OPTIONS[option]
        self.multipliers = options.get("multipliers", False)
        self.arguments = arguments | {k: v for k, v in options.items() if k != "multipliers"}
        self.infinite = "skip_nonfinite" in options

    def optimizer_arguments(self):
        """Made anew, as schedules are called and changed; without `decoupled_wd` where decay is decoupled already."""
        made = {k: v(self.arguments["learning_rate"]) if callable(v) else v for k, v in self.arguments.items()}
        if made.get("decoupled_wd") and self.klass in (
            optimizer.AdamW,
            optimizer.LAMB,
            optimizer.Lion,
            optimizer.Signum,
            optimizer.Muon,
        ):
            del made["decoupled_wd"]
        return made

    def optimizer(self):
        return self.klass(**self.optimizer_arguments())

    def net(self):
        """Parameters whose names are in order, in which Gluon updates them where numbers depend on it."""
        generator = torch.Generator().manual_seed(0)
        net = torch.nn.Module()
        for name, shape in SHAPES.items():
            net.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(self.dtype)))
        if self.multipliers:
            net.a_weight.lr_mult, net.b_gamma.wd_mult, net.c_weight.wd_mult = 0.5, 0.0, 2.0
        return net

    def gradients(self, step):
        """Those of a step, of all parameters: of changing size, and at one step without bound where that is skipped."""
        generator = torch.Generator().manual_seed(step)
        scale = (1.0, 3.0, 0.5, 2.0, 1.0)[step]
        made = [scale * torch.randn(shape, generator=generator) for shape in SHAPES.values()]
        if self.infinite and step == 2:
            made[1][0] = torch.inf
        return [gradient.to(self.dtype) for gradient in made]

    def loss(self, net, step, scale=1.0):
        """A loss whose gradients are `scale` times those."""
        pairs = zip(net.parameters(), self.gradients(step), strict=True)
        return sum((param * (torch.zeros_like(grad) if scale == 0 else grad * scale)).sum() for param, grad in pairs)


def answer(net, trainer=None):
    """What is compared: all weights, and the states by parameter and name."""
    states = {} if trainer is None else trainer.state_dict()["state"]
    found = {name: param.detach().clone() for name, param in net.named_parameters()}
    for name, row in states.items():
        found |= {f"{key} of {name}": value.clone() for key, value in row.items() if isinstance(value, torch.Tensor)}
    return found


def train(case, steps=range(STEPS), net=None, take=None, **arguments):
    """Train with a `Trainer` of one replica."""
    net = case.net() if net is None else net
    trainer = Trainer(net, case.optimizer(), engine=ENGINE, **arguments)
    run(case, net, trainer, steps, take)
    return net, trainer


def run(case, net, trainer, steps, take=None):
    for step in steps:
        if take is not None:
            take(net, trainer, step)
        else:
            trainer.zero_grad()
            case.loss(net, step).backward()
            trainer.step(1)


def one(**arguments):
    def path(case, tmp_path):
        return answer(*train(case, **arguments))

    return path


def in_parts(case, tmp_path):
    def take(net, trainer, step):
        trainer.zero_grad()
        case.loss(net, step).backward()
        trainer.allreduce_grads()
        trainer.update(1)

    return answer(*train(case, take=take))


def in_backward(case, tmp_path):
    def take(net, trainer, step):
        with trainer.step_in_backward(1):
            case.loss(net, step).backward()

    return answer(*train(case, take=take))


def zero_grads(case, tmp_path):
    def take(net, trainer, step):
        case.loss(net, step).backward()
        trainer.step(1)

    return answer(*train(case, take=take, zero_grads=True))


def accumulated(case, tmp_path):
    def take(net, trainer, step):
        trainer.zero_grad()
        case.loss(net, step, 0.5).backward()
        case.loss(net, step, 0.5).backward()
        trainer.step(1)

    return answer(*train(case, take=take))


def captured(case, tmp_path):
    net = case.net()
    trainer = Trainer(net, case.optimizer(), engine=ENGINE)

    def whole(step):
        trainer.zero_grad()
        loss = case.loss(net, int(step))
        loss.backward()
        trainer.step(1)
        return loss

    capture = trainer.capture(whole)
    for step in range(STEPS):
        capture(torch.tensor(step))
    return answer(net, trainer)


def resumed(case, tmp_path):
    net, trainer = train(case, range(2))
    trainer.save_states(tmp_path / "states")
    again = Trainer(net, case.optimizer(), engine=ENGINE)
    again.load_states(tmp_path / "states")
    run(case, net, again, range(2, STEPS))
    return answer(net, again)


def replicas(kvstore, update_on_kvstore=None):
    def path(case, tmp_path):
        nets = [case.net(), case.net()]
        trainer = Trainer(nets, case.optimizer(), kvstore=kvstore, update_on_kvstore=update_on_kvstore, engine=ENGINE)
        for step in range(STEPS):
            trainer.zero_grad()
            for r, net in enumerate(nets):
                case.loss(net, step, 1.0 if kvstore is None else float(r == 0)).backward()
            trainer.step(1)
        first, second = answer(nets[0], trainer), answer(nets[1])
        assert all(torch.equal(first[name], value) for name, value in second.items())
        return first

    return path


def several(case, tmp_path):
    """One optimizer as the only one of several."""
    net = case.net()
    trainer = Trainer(net, [("*", case.optimizer())], engine=ENGINE)
    run(case, net, trainer, range(STEPS))
    return answer(net, trainer)


def updater(case, tmp_path):
    net, made = case.net(), case.optimizer()
    named(case, net, made)
    update = optimizer.get_updater(made)
    params = list(net.parameters())
    for step in range(STEPS):
        update(list(range(len(params))), case.gradients(step), [param.data for param in params])
    return answer(net)


def updates(case, tmp_path):
    """`Optimizer.update_multi_precision`, one parameter after the other."""
    net, made = case.net(), case.optimizer()
    named(case, net, made)
    weights = [param.data for param in net.parameters()]
    with torch.no_grad():
        states = [made.create_state_multi_precision(i, weight) for i, weight in enumerate(weights)]
        for step in range(STEPS):
            for i, gradient in enumerate(case.gradients(step)):
                made.update_multi_precision(i, weights[i], gradient, states[i])
    return answer(net)


def named(case, net, made):
    made.use_parameters(list(net.parameters()), [name for name, _ in net.named_parameters()])


def as_torch(case, tmp_path, wrap=lambda net: net):
    """The optimizer behind torch's interface; what torch has other ways for, schedules and multipliers, by groups."""
    arguments = case.optimizer_arguments()
    rate, decay, plan = arguments.pop("learning_rate"), arguments.pop("wd", 0.0), arguments.pop("lr_scheduler", None)
    by_hand = case.optimizer() if arguments.pop("schedules", None) else None
    net = wrap(case.net())
    pairs = [(param, *(getattr(param, name, 1.0) for name in ("lr_mult", "wd_mult"))) for param in net.parameters()]
    groups = [
        {"params": [param], "lr": rate * lr_mult, "weight_decay": decay * wd_mult} for param, lr_mult, wd_mult in pairs
    ]
    if not case.multipliers:
        groups = [{"params": list(net.parameters()), "lr": rate, "weight_decay": decay}]
    made = tristep.optim.as_torch(case.klass)(groups, **arguments)
    for step in range(STEPS):
        for group, (_, lr_mult, _) in zip(made.param_groups, pairs, strict=False):
            group["lr"] = (rate if plan is None else plan(step + 1)) * lr_mult
            if by_hand is not None:
                group |= {TORCHS.get(name, name): value for name, value in by_hand.scheduled_at(step + 1).items()}
        for param, grad in zip(net.parameters(), case.gradients(step), strict=True):
            is_shard = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_shard else grad
        made.step()
    return answer(net)


class LinearNet(torch.nn.Module):
    """The network of a case, whose output for a row of gradients is the loss that has them."""

    def __init__(self, case):
        super().__init__()
        for name, param in case.net().named_parameters():
            self.register_parameter(name, param)

    def forward(self, x):
        return (x * torch.cat([param.flatten() for param in self.parameters()])).sum(1)


def swept(case, tmp_path):
    arguments = case.optimizer_arguments()
    rate = arguments.pop("learning_rate")
    batches = [(torch.cat([g.flatten() for g in case.gradients(step)])[None], torch.zeros(1)) for step in range(STEPS)]
    grid = {"learning_rate": [rate, rate / 2]}
    settings = {"optimizer": case.klass, "grid": grid, "optimizer_params": arguments, "engine": ENGINE}
    found = tristep.sweep(lambda: LinearNet(case), lambda output, label: output, batches, **settings)
    return answer(found.model(learning_rate=rate))


PATHS = {
    "update": in_parts,
    "step_in_backward": in_backward,
    "zero_grads": zero_grads,
    "accumulated": accumulated,
    "capture": captured,
    "resumed": resumed,
    "replicas, device": replicas("device"),
    "replicas, local": replicas("local"),
    "replicas, device, update_on_kvstore": replicas("device", True),
    "replicas, local, copies update": replicas("local", False),
    "replicas by themselves": replicas(None),
    "ZeRO": one(kvstore="dist_sync", update_on_kvstore=True),
    "all-reduce": one(kvstore="dist_sync", update_on_kvstore=False),
    "several optimizers": several,
    "Updater": updater,
    "Optimizer.update": updates,
    "sweep": swept,
    "as_torch": as_torch,
}


@functools.cache
def expected(name, option):
    """The answer of `Trainer.step`; an error where the optimizer does not have the option."""
    case = Case(name, option)
    try:
        return answer(*train(case))
    except (TypeError, ValueError) as error:
        return error


NOT_IN_GRAPHS = {"those of matrices", "many with norms", "cautious_wd", "ema_decay"}
NORMS = {"clip_norm", "skip_norm", "skip_nonfinite", "those of matrices", "many with norms"}
MANY_OPTIONS = {"many", "many with norms"}
# What is refused, with a word of the message: by path the options, and the optimizers with any option.
REFUSED = {
    "step_in_backward": (dict.fromkeys(NORMS, "sums over all gradients"), {"by hand": "ByHand"}),
    "capture": ({}, {"by hand": "ByHand"}),
    "several optimizers": (dict.fromkeys({"begin_num_update"} | MANY_OPTIONS, "begin_num_update"), {}),
    "as_torch": (
        {"begin_num_update": "begin_num_update", **dict.fromkeys({"rescale_grad"} | MANY_OPTIONS, "rescale_grad")},
        {"by hand": "ByHand"},
    ),
    "shards": (
        {"begin_num_update": "begin_num_update", **dict.fromkeys({"rescale_grad"} | MANY_OPTIONS, "rescale_grad")},
        {"by hand": "ByHand"},
    ),
    "Optimizer.update": (
        {
            **{name: name for name in NORMS - MANY_OPTIONS - {"those of matrices"}},
            "many with norms": "clip_norm",
            "those of matrices": "clip_norm",
            "split master": "remainder",
            "split master of 24 bits": "split8",
        },
        {},
    ),
    "sweep": ({}, {}),
}
# Groups of torch's optimizers are optimizers of their own, and Nadam has one product of momenta for each. Random numbers of
# pieces of a parameter are others than those of the whole. Of LARS's parameters that are updated one by one, only the first
# sees a change of the rate, as in MXNet.
OTHERWISE = {(path, "multipliers", "nadam") for path in ("as_torch", "shards")}
OTHERWISE |= {("Optimizer.update", option, "lars") for option in ("lr_scheduler", "schedules", "many")}
OTHERWISE |= {
    (path, option, name)
    for path in ("shards", "ZeRO of several ranks")
    for option in ("stochastic_rounding", "split master of 24 bits")
    for name in OPTIMIZERS
}


@pytest.fixture(scope="module")
def group():
    """A process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def check(path, option, name, follow):
    """Compare what `follow` returns with the answer of `Trainer.step`, or see that it is refused as `REFUSED` says."""
    reference = expected(name, option)
    if isinstance(reference, Exception) or (path, option, name) in OTHERWISE:
        return
    options, optimizers = REFUSED.get(path, ({}, {}))
    word = optimizers.get(name) or options.get(option)
    if word is None and (path, name) == ("shards", "muon") and option in NORMS:
        word = "sum over all parameters"
    if (path, name) == ("capture", "muon") and option in NOT_IN_GRAPHS:
        word = "options that change the rule"
    if word is not None:
        with pytest.raises((TypeError, ValueError), match=word):
            follow()
        return
    same(follow(), reference)


def same(answers, reference):
    """Equal but for the last bits of sums, which depend on where tensors are in memory."""
    for key in answers.keys() & reference.keys():
        found, right = answers[key].double(), reference[key].double()
        torch.testing.assert_close(found, right, rtol=1e-5, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.sample(120)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("group")
def test_an_option_means_the_same_on_every_path(path, option, name, tmp_path):
    check(path, option, name, lambda: PATHS[path](Case(name, option), tmp_path))


def on_ranks(path, cases):
    """What a path gives on this rank for each of the cases: arrays, or the text of an error."""
    answers = []
    for number, (name, option) in enumerate(cases):
        try:
            answers.append({key: value.double().numpy() for key, value in path(Case(name, option), number).items()})
        except (TypeError, ValueError, NotImplementedError) as error:  # noqa: PERF203
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def summed(cases, update_on_kvstore):
    """Gradients are sums over ranks, and zeros on all but the first."""

    def path(case, number):
        net = case.net()
        trainer = Trainer(net, case.optimizer(), kvstore="dist_sync", update_on_kvstore=update_on_kvstore, engine=ENGINE)
        for step in range(STEPS):
            trainer.zero_grad()
            case.loss(net, step, float(dist.get_rank() == 0)).backward()
            trainer.step(1)
        return answer(net, trainer)

    return on_ranks(path, cases)


def sharded(cases, _):
    """`as_torch` on DTensors whose rows are on several ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def split(net):
        for name, param in list(net.named_parameters()):
            shard = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
            vars(shard).update(vars(param))
            net.register_parameter(name, shard)
        return net

    def path(case, number):
        return {name: param.full_tensor() for name, param in as_torch(case, None, split).items()}

    return on_ranks(path, cases)


def pushed(store, cases):
    """A worker's pushes to a server, of all parameters together."""

    def path(case, number):
        net, made = case.net(), case.optimizer()
        keys, params = [f"{number}/{i}" for i in range(len(SHAPES))], list(net.parameters())
        made.set_lr_mult({key: getattr(param, "lr_mult", 1.0) for key, param in zip(keys, params, strict=True)})
        made.set_wd_mult({key: getattr(param, "wd_mult", 1.0) for key, param in zip(keys, params, strict=True)})
        store.set_optimizer(made)
        store.init(keys, [param.data for param in params])
        for step in range(STEPS):
            store.push(keys, case.gradients(step))
        store.pull(keys, [param.data for param in params])
        return answer(net)

    return on_ranks(path, cases)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("path", ["ZeRO of several ranks", "all-reduce", "shards", "server"])
def test_an_option_means_the_same_in_several_processes(path, name, processes, run_job):
    if path == "server" and OPTIMIZERS[name][0].__module__ == __name__:
        pytest.skip("a server only knows optimizers of the registry")
    cases = [(name, option) for option in OPTIONS if not isinstance(expected(name, option), Exception)]
    if path == "server":
        (answers,) = run_job(pushed, 1, cases)
    else:
        function = sharded if path == "shards" else summed
        answers = processes(2).run(function, cases, path == "ZeRO of several ranks")[0]
    for (_, option), found in zip(cases, answers, strict=True):
        check(path, option, name, functools.partial(given, found))


def given(found):
    """The answer of another process, which may be an error."""
    if isinstance(found, str):
        raise ValueError(found)
    return {key: torch.from_numpy(value) for key, value in found.items()}
