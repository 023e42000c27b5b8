"""Loading with `strict=False`: what fits goes on to the bit, the rest starts anew, and what cannot be is refused."""

import zlib

import pytest
import torch
import torch.distributed as dist
from replicas import Remote, copies_of
from sharded_training import as_arrays, backward, make_net, make_optimizer, on_ranks, same_state

import tristep
from tristep import Trainer, lr_scheduler

OLD = {"a.weight": (3, 4), "b.weight": (4, 4), "b.bias": (4,), "head.weight": (2, 4)}
HEADLESS = {name: shape for name, shape in OLD.items() if name != "head.weight"}
CHANGES = {
    "nothing": OLD,
    "added layer": {**OLD, "c.weight": (4, 2)},
    "inserted layer": {"a.weight": (3, 4), "c.weight": (4, 2), **OLD},
    "replaced head": {**HEADLESS, "head.weight": (5, 4)},
    "renamed head": {**HEADLESS, "top.weight": (2, 4)},
    "removed adapter": {"a.weight": (3, 4), "head.weight": (2, 4)},
    "reordered": {name: OLD[name] for name in ("a.weight", "head.weight", "b.bias", "b.weight")},
}
LR, STEPS = 0.05, 3


def _numbers(text, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())), dtype=torch.float64)


def _made(shapes):
    return {name: torch.nn.Parameter(_numbers(name, shape)) for name, shape in shapes.items()}


def _step(params, step, first=0, last=STEPS):
    for i in range(first, last):
        for name, param in params.items():
            param.grad = _numbers(f"{name} {i}", param.shape)
        step()


class OfTrainer:
    def __init__(self, params, lr=LR, optimizer="adam"):
        self.optimizer = Trainer(params, optimizer, {"learning_rate": lr, "epsilon": 1e-30})

    def step(self):
        self.optimizer.step(1)

    def pass_on(self, other, tmp_path):
        return other.optimizer.load_state_dict(self.optimizer.state_dict(), strict=False)


class OfFile(OfTrainer):
    def pass_on(self, other, tmp_path):
        self.optimizer.save_states(tmp_path / "states")
        return other.optimizer.load_states(tmp_path / "states", strict=False)


class OfNames(OfTrainer):
    def __init__(self, params, lr=LR):
        self.optimizer = tristep.optim.Adam(params.items(), lr=lr, eps=1e-30, weight_decay=0.0)

    def step(self):
        self.optimizer.step()


class OfPlaces(OfNames):
    def __init__(self, params, lr=LR):
        self.optimizer = tristep.optim.Adam(params.values(), lr=lr, eps=1e-30, weight_decay=0.0)


class OfTorch(OfNames):
    def __init__(self, params, lr=LR):
        self.optimizer = torch.optim.Adam(params.items(), lr=lr, eps=1e-30, weight_decay=0.0)


def _sources(shapes, face):
    """Return for each parameter the one of the old model whose states it gets, or None."""
    if face is not OfPlaces:
        return {name: name if OLD.get(name) == shape else None for name, shape in shapes.items()}
    old = [*OLD, *[None] * len(shapes)]
    return {name: old[i] if OLD.get(old[i]) == shape else None for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("face", [OfTrainer, OfFile, OfNames, OfPlaces])
def test_what_fits_goes_on_and_the_rest_starts_anew(face, change, tmp_path, capsys):
    if face is OfFile:
        pytest.importorskip("safetensors", reason="files need it")
    shapes, old = CHANGES[change], _made(OLD)
    first = face(old)
    _step(old, first.step)
    params = _made(shapes)
    second = face(params, lr=1.0)  # the file's settings are used
    _step(params, second.step, 0, 1)  # states here are replaced, or start anew, too
    found = first.pass_on(second, tmp_path)
    sources = _sources(shapes, face)
    assert len(found.loaded) + len(found.anew) == len(shapes)
    assert len(found.loaded) == len(shapes) - [*sources.values()].count(None)
    if face is not OfPlaces:
        assert set(found.loaded) == {name for name, source in sources.items() if source}
        assert set(found.unused) == set(OLD) - set(found.loaded)
    assert f"loaded: {len(found.loaded)}" in capsys.readouterr().out
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(old[name] if name in old and old[name].shape == param.shape else _numbers(name, param.shape))
    starts = {name: param.detach().clone() for name, param in params.items()}
    _step(params, second.step, STEPS, 2 * STEPS)
    for name, source in sources.items():
        for kind in (face, OfTorch):
            alone = _made({source or name: OLD[source] if source else shapes[name]})
            one = kind(alone)
            if source:
                _step(alone, one.step)
            with torch.no_grad():
                (param,) = alone.values()
                param.copy_(starts[name])
            _step({name: param}, one.step, STEPS, 2 * STEPS)
            torch.testing.assert_close(params[name], param, rtol=0 if kind is face else 1e-12, atol=0)


@pytest.mark.parametrize("update_on_kvstore", [False, True])
def test_replicas_load_what_fits(update_on_kvstore):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    saved = Trainer(net, "adam").state_dict()
    (first, second), trained = copies_of(net, 2), torch.nn.Linear(3, 4).double()
    first[1], second[1] = copies_of(trained, 2)
    trainer = Trainer([first, second], "adam", update_on_kvstore=update_on_kvstore)
    found = trainer.load_state_dict(saved, strict=False)
    assert (found.loaded, found.anew) == (["0.weight", "0.bias"], ["1.weight", "1.bias"])


@pytest.mark.parametrize("settings", ["file", "mine"])
@pytest.mark.parametrize("optimizer", ["sgd", [("*.bias", "sgd"), ("*", "sgd")]])
def test_settings_and_schedule_are_of_the_file_or_mine(settings, optimizer):
    schedules = [lr_scheduler.FactorScheduler(2, 0.5, base_lr=lr) for lr in (0.1, 0.8)]
    first, second = (
        Trainer(
            _made(shapes), optimizer, {"momentum": momentum, "lr_scheduler": schedule, "learning_rate": schedule.base_lr}
        )
        for shapes, momentum, schedule in zip((OLD, HEADLESS), (0.5, 0.9), schedules, strict=True)
    )
    _step(dict(zip(first._names, first._params, strict=True)), lambda: first.step(1))
    own = second.optimizer.lr_scheduler
    second.load_state_dict(first.state_dict(), strict=False, settings=settings)
    part = getattr(second.optimizer, "optimizers", [second.optimizer])[0]
    assert part.momentum == {"file": 0.5, "mine": 0.9}[settings]
    assert (second.optimizer.lr_scheduler is own) == (settings == "mine")
    assert second.learning_rate == {"file": 0.05, "mine": 0.4}[settings]  # at the file's number of updates
    assert second.optimizer.num_update == STEPS


@pytest.mark.parametrize("settings", ["file", "mine"])
@pytest.mark.parametrize("make", [tristep.optim.SGD, lambda params, **options: tristep.optim.SAM(params, "SGD", **options)])
def test_options_of_groups_are_of_the_file_or_mine(make, settings):
    first, second = (make(_made(OLD).items(), lr=lr, momentum=0.9) for lr in (0.1, 0.8))
    found = second.load_state_dict(first.state_dict(), strict=False, settings=settings)
    assert found.loaded == list(OLD)
    assert second.param_groups[0]["lr"] == {"file": 0.1, "mine": 0.8}[settings]


def test_groups_that_were_divided_load_with_settings_of_mine():
    first, params = tristep.optim.Adam(_made(OLD).items(), lr=0.1), _made(OLD)
    _step(dict(zip(OLD, first.param_groups[0]["params"], strict=True)), first.step)
    halves = [list(params.items())[:2], list(params.items())[2:]]
    second = tristep.optim.Adam([{"params": half} for half in halves], lr=0.2)
    with pytest.raises(ValueError, match="has 1 groups, this optimizer 2: settings='mine' loads"):
        second.load_state_dict(first.state_dict(), strict=False)
    found = second.load_state_dict(first.state_dict(), strict=False, settings="mine")
    assert found.loaded == list(OLD)
    assert all(row["step"] == STEPS for row in second.state.values())


@pytest.mark.parametrize("make", [Trainer, tristep.optim.MultiOptimizer])
def test_a_parameter_of_another_optimizer_starts_anew(make):
    wider = {**OLD, "c.bias": (3,)}
    first, second = (
        make(_made(shapes).items(), [(pattern, "sgd", {"momentum": 0.9}), ("*", "adam")])
        for shapes, pattern in ((OLD, "*.bias"), (wider, "*.bias|head.*"))
    )
    found = second.load_state_dict(first.state_dict(), strict=False)
    assert (set(found.anew), found.unused) == ({"c.bias", "head.weight"}, ["head.weight"])
    second.load_state_dict(second.state_dict())


@pytest.mark.parametrize("optimizer", ["adam", "mine"])
def test_what_was_loaded_is_saved_before_a_step(optimizer, clean_registry):
    @tristep.optimizer.register
    class Mine(tristep.optimizer.Optimizer):
        def create_state(self, index, weight):
            return torch.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            state.add_(grad)
            weight.sub_(state)

    old = _made(OLD)
    first, second = Trainer(old, optimizer), Trainer(_made(CHANGES["replaced head"]), optimizer)
    _step(old, lambda: first.step(1))
    second.load_state_dict(first.state_dict(), strict=False)
    saved = second.state_dict()
    assert saved["counts"] == {name: 0 if name == "head.weight" else STEPS for name in OLD}
    assert all(not tensor.any() for tensor in saved["state"]["head.weight"].values())
    Trainer(_made(CHANGES["replaced head"]), optimizer).load_state_dict(saved)


class _Net(torch.nn.Module):
    """A net with running means, an extra state and a head, whose name and size may be another model's."""

    def __init__(self, head, size):
        super().__init__()
        torch.manual_seed(size)
        self.body, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
        self.add_module(head, torch.nn.Linear(3, size))
        self.top_name, self.extra = head, size

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        return getattr(self, self.top_name)(self.norm(self.body(x)))


@pytest.mark.parametrize("by_manager", [False, True])
@pytest.mark.parametrize("new", [("head", 5), ("top", 2)])
def test_a_checkpoint_resumes_with_another_head(new, by_manager, tmp_path, capsys):
    pytest.importorskip("safetensors", reason="files need it")
    net, other = _Net("head", 2), _Net(*new)
    first, second = Trainer(net, "adam"), Trainer(other, "adam", {"learning_rate": 0.7})
    with tristep.CheckpointManager(tmp_path, first, net) as manager:
        for _ in range(STEPS):
            net(torch.randn(4, 4)).square().sum().backward()
            first.step(1)
            first.zero_grad()
        manager.save()
    resumer = tristep.CheckpointManager(tmp_path, second, other) if by_manager else second
    arguments = () if by_manager else (tmp_path, other)
    with pytest.raises(ValueError, match="strict=False"):
        resumer.resume(*arguments)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items() if name != "_extra_state"}
    found = resumer.resume(*arguments, strict=False, settings="mine")
    heads = [f"{new[0]}.{kind}" for kind in ("bias", "weight")]
    assert found.step == STEPS
    assert sorted(found.states.anew) == sorted(found.weights.anew) == heads
    assert (other.extra, second.learning_rate) == (2, 0.7)
    for name, tensor in before.items():
        assert torch.equal(other.state_dict()[name], tensor if name in heads else net.state_dict()[name]), name
    assert second.optimizer.counts == {i: 0 if name in heads else STEPS for i, name in enumerate(second._names)}
    assert capsys.readouterr().out.count("start anew: 2") == 2


def _load(first, second, **options):
    return lambda: second.load_state_dict(first.state_dict(), **options)


def _with_store(params):
    return Trainer(params, "adam", kvstore=Remote(), update_on_kvstore=True)


NEW, WIDER = CHANGES["replaced head"], CHANGES["added layer"]
PRODIGY = "Prodigy keeps numbers of all parameters together, with which 'c.weight' cannot start anew"
OPTIM = tristep.optim
REFUSED = {
    "nothing fits": (
        lambda: (Trainer(_made(OLD), "adam"), Trainer(_made({"x": (2,)}), "adam")),
        "none of the 4 saved parameters, .* fits one of the 1 here, 'x'",
    ),
    "class": (lambda: (Trainer(_made(OLD), "adam"), Trainer(_made(NEW), "sgd")), "is of optimizer 'adam'"),
    "kept": (lambda: (Trainer(_made(OLD), "prodigy"), Trainer(_made(WIDER), "prodigy")), PRODIGY),
    "carried": (lambda: (Trainer(_made(OLD), "nadam"), Trainer(_made(NEW), "nadam")), "Nadam keeps numbers of all"),
    "store": (
        lambda: (Trainer(_made(OLD), "adam"), _with_store(_made(NEW))),
        "strict=False where the store has the states in parts or in another process",
    ),
    "parts": (
        lambda: (
            Trainer(_made(OLD), [("*", "adam")]),
            Trainer(_made(NEW), [("*.bias", "sgd"), ("*", "adam")]),
        ),
        r"is of the optimizers \['adam'\], this trainer has \['sgd', 'adam'\]",
    ),
    "kept, optim": (lambda: [OPTIM.Prodigy(_made(each).items()) for each in (OLD, WIDER)], PRODIGY),
    "groups, optim": (
        lambda: (
            OPTIM.MultiOptimizer(_made(OLD).items(), [("*", "adam")]),
            OPTIM.MultiOptimizer(_made(NEW).items(), [("*.bias", "sgd"), ("*", "adam")]),
        ),
        "has 1 groups, this optimizer 2: make it with as many",
    ),
    "another library, optim": (
        lambda: [OPTIM.MultiOptimizer(_made(each).items(), [("*", torch.optim.Adam)]) for each in (OLD, NEW)],
        "strict=False with Adam: it must be an optimizer of tristep.optim",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_start_anew_is_refused(case):
    make, message = REFUSED[case]
    first, second = make()
    before = repr(second.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        _load(first, second, strict=False)()
    assert repr(second.state_dict()) == before


@pytest.mark.parametrize("make", [lambda params: Trainer(params, "adam"), lambda params: OPTIM.Adam(params.items())])
@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (HEADLESS, {}, "strict=False"),
        (NEW, {}, "strict=False"),
        (NEW, {"settings": "mine"}, "settings='mine' needs strict=False"),
        (NEW, {"strict": False, "settings": "yours"}, "settings='yours'"),
    ],
)
def test_a_strict_load_names_the_other_one(make, shapes, options, message):
    old = _made(OLD)
    first, second = make(old), make(_made(shapes))
    _step(old, first.step if isinstance(first, torch.optim.Optimizer) else lambda: first.step(1))
    with pytest.raises(ValueError, match=message):
        _load(first, second, **options)()


def _across_ranks():
    rank, ranks, names = dist.get_rank(), dist.get_world_size(), set()
    for updates in (True, False):
        net = make_net()
        trainer = on_ranks(net, make_optimizer("adam", {"learning_rate": 0.01}), updates)
        backward(net, 0, rank, ranks, None)
        trainer.step(12)
        saved = trainer.state_dict()
        names = {name for name in saved["parameters"] if name.endswith("bias")}
        saved["parameters"] = {f"{'old.' * (name in names)}{name}": n for name, n in saved["parameters"].items()}
        if updates:
            with pytest.raises(ValueError, match="strict=False where the store has the states in parts"):
                trainer.load_state_dict(saved, strict=False)
    found = trainer.load_state_dict(saved, strict=False)
    backward(net, 1, rank, ranks, None)
    trainer.step(12)
    return set(found.anew) == names, as_arrays(trainer.state_dict())


def test_ranks_load_what_fits_unless_they_share_the_states(processes):
    (right, state), (_, other) = processes(2).run(_across_ranks)
    assert right
    same_state(state, other)
