"""Training steps as CUDA graphs: replays are bit-equal to steps as they are, whatever changes between them.

Without a GPU the graph is played: it notes torch's operations and the kernels' launches without running anything that
changes memory, and replays these and nothing else, with the kernels in Triton's interpreter.
"""

from functools import partial

import pytest
import torch
from played_graphs import HAS_GPU, PlayedGraph, played

import tristep
from tristep import StaleGradientError, Trainer, amp
from tristep.kernels import streams

launch = pytest.importorskip("tristep.kernels.backends.triton.launch", reason="Triton has builds for Linux only")

FULL = pytest.mark.sample(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", "float16")
    with played(monkeypatch):
        yield


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(DEVICE)


def batches(n, size=6):
    torch.manual_seed(1)
    return [torch.randn(size, 4, device=DEVICE) for _ in range(n)]


def tensors_of(trainer, net):
    states = [state for row in trainer._updater.states.values() for state in row]
    return [*net.parameters(), *states, *trainer._updater.masters.values()]


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pair(name, options, scaled=False, form="none", **others):
    """Twice the same training: trainer, network and a function that trains; the second one is to be captured."""
    made = []
    for _ in range(2):
        net = network()
        trainer = Trainer(net, name, options, engine="triton", **others)
        if scaled:
            amp.init_trainer(trainer, amp.LossScaler(2.0**10, scale_window=3))

        def train(x, net=net, trainer=trainer):
            if form != "add":
                trainer.zero_grad(set_to_none=form == "none")
            loss = net(x).square().mean()
            if scaled:
                with amp.scale_loss(loss, trainer) as larger:
                    larger.backward()
            else:
                loss.backward()
            trainer.step(2)
            return loss

        made.append((trainer, net, train))
    return made


def change(trainer, net, step):
    """What a training may change between steps."""
    optimizer = trainer.optimizer
    if optimizer.lr_scheduler is None:
        trainer.set_learning_rate(0.02 / (step + 1))
    for option, value in (
        ("wd", 0.01 * step),
        ("beta1", 0.9 - 0.02 * step),
        ("clip_norm", 0.1 + 0.05 * step),
        ("clip_gradient", 0.5 / (step + 1)),
    ):
        if getattr(optimizer, option, None) is not None and option not in optimizer.schedules:
            setattr(optimizer, option, value)
    net[0].weight.lr_mult = 1.0 + step


GUARDS = {"agc": 0.1, "skip_norm": 0.3}
CASES = {
    "adam": ("adam", {"clip_gradient": 0.5}, {}),
    "adam, schedule": ("adam", {"lr_scheduler": tristep.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}, {}),
    "adam, schedules": (
        "adam",
        {"schedules": {"wd": tristep.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1), "beta1": lambda n: 0.9 - 0.01 * n}},
        {},
    ),
    "matrices, schedules": ("muon", {"schedules": {"wd": tristep.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}}, {}),
    "all options": (
        "adam",
        {"clip_norm": 0.5, "cautious": True, "decoupled_wd": True, "lookahead": 3, "ema_decay": 0.9, "skip_nonfinite": True},
        {},
    ),
    "guards": ("adam", GUARDS, {}),
    "guards and loss scale": ("lamb", GUARDS, {"scaled": True}),
    "several, limited together": (
        [("ndim<2", "adam", {"clip_norm": 0.2}), ("*", "lamb")],
        {"clip_norm": 0.5, "skip_nonfinite": True},
        {},
    ),
    "per-tensor state": ("novograd", {}, {}),
    "states of rows": ("adafactor", {}, {}),
    "per-tensor state of all": ("prodigy", {}, {}),
    "random numbers": ("sgld", {}, {}),
    "matrices": ("muon", {}, {"form": "add", "zero_grads": True}),
    "matrices, rows": ("normuon", {"beta1": 0.8, "multi_precision": True}, {}),
    "matrices, stochastic rounding": ("muon", {"state_dtype": "bfloat16", "stochastic_rounding": True}, {}),
    "matrices, limit and loss scale": ("normuon", {"clip_norm": 0.5}, {"scaled": True}),
    "stochastic rounding": ("adamw", {"state_dtype": "bfloat16", "stochastic_rounding": True}, {}),
    "loss scale": ("adam", {"clip_norm": 0.5}, {"scaled": True}),
    "gradients zeroed by hand": ("adam", {}, {"form": "zeros"}),
    "gradients zeroed by the step": ("lamb", {}, {"form": "add", "zero_grads": True}),
}


@pytest.mark.parametrize("case", [each if each == "loss scale" else pytest.param(each, marks=FULL) for each in CASES])
def test_replays_are_steps_to_the_bit(case):
    name, options, others = CASES[case]
    (trainer, net, train), (other, copy, train_copy) = pair(name, options, **others)
    step = other.capture(train_copy, warmup=2)
    for k, x in enumerate(batches(8)):
        if others.get("scaled") and k in (1, 4, 5):
            x = x * float("inf")
        change(trainer, net, k)
        change(other, copy, k)
        loss = train(x)
        found = step(x)
        assert step.is_recorded == (k >= 2)
        assert torch.equal(found, loss.detach()) or (found.isnan() and loss.isnan())
        assert equal(tensors_of(other, copy), tensors_of(trainer, net))
        assert other.optimizer.num_update == trainer.optimizer.num_update == k + 1
        assert other.optimizer.counts == trainer.optimizer.counts
        assert other.learning_rate == trainer.learning_rate
    if others.get("scaled"):
        assert other.state_dict()["loss_scaler"] == trainer.state_dict()["loss_scaler"]
        assert trainer._loss_scaler.loss_scale != 2.0**10
    assert PlayedGraph.made == (0 if HAS_GPU else 1)


def stacked():
    """Three matrices of one shape, which are computed together."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(3))).to(DEVICE)


@pytest.mark.parametrize("optim", [False, True], ids=["Trainer", "optim"])
def test_a_graph_of_matrices_is_recorded_anew_for_numbers_that_it_keeps(optim, monkeypatch):
    """Which are those of the stage between the kernels: here the decay rate of the rows' averages."""
    monkeypatch.setenv("TRISTEP_ENGINE", "triton")
    monkeypatch.setattr(tristep.trainer.optim.base, "_is_on_host", lambda tensor: False)
    nets, steps, change = [stacked(), stacked()], [], []
    for net in nets:
        if optim:
            groups = [{"params": [each.weight]} for each in net]
            stepped = tristep.optim.NorMuon(groups, lr=0.1)
            clear, step = stepped.zero_grad, stepped.step
        else:
            stepped = Trainer(net, "normuon", {"learning_rate": 0.1})
            clear, step = stepped.zero_grad, partial(stepped.step, 1)

        def train(x, net=net, clear=clear, step=step):
            clear()
            net(x).square().mean().backward()
            step()

        steps.append(stepped.capture(train, warmup=2) if steps else train)
        change.append(partial(changed, stepped, net, optim))
    made = []
    for k, x in enumerate(torch.randn(14, 5, 6, device=DEVICE)):
        for each, step in zip(change, steps, strict=True):
            each(k)
            step(x)
        made.append(steps[1].is_recorded)
        assert equal(nets[0].parameters(), nets[1].parameters())
    assert made == [k >= 2 and k != 6 for k in range(14)]


def changed(stepped, net, optim, k):
    rate, decay, momentum, row_beta = 0.1 / (k + 1), 0.01 * k, 0.95 - 0.01 * k, 0.95 if k < 6 else 0.8
    if optim:
        for group in stepped.param_groups:
            group |= {"lr": rate, "weight_decay": decay, "momentum": momentum, "row_beta": row_beta}
        stepped.param_groups[1]["lr"] *= 1 + (k >= 10)
    else:
        stepped.set_learning_rate(rate)
        stepped.optimizer.wd, stepped.optimizer.momentum, stepped.optimizer.row_beta = decay, momentum, row_beta
        net[1].weight.lr_mult = 1.0 + (k >= 10)


def test_smaller_batches_and_steps_by_hand_between_replays():
    (trainer, net, train), (other, copy, train_copy) = pair("adam", {})
    step = other.capture(train_copy, warmup=2)
    for k, x in enumerate(batches(7)):
        if k == 3:
            x = x[:5]
        loss = train(x)
        found = train_copy(x) if k == 5 else step(x)
        assert torch.equal(found.detach(), loss.detach())
        assert equal(tensors_of(other, copy), tensors_of(trainer, net))
    assert PlayedGraph.made == (0 if HAS_GPU else 1)


def test_states_that_are_loaded_are_captured_anew():
    (trainer, net, train), (other, copy, train_copy) = pair("adam", {})
    step = other.capture(train_copy, warmup=2)
    inputs = batches(7)
    for k, x in enumerate(inputs):
        if k == 3:
            for each, module in ((trainer, net), (other, copy)):
                state = {name: value.clone() for name, value in module.state_dict().items()}
                each.load_state_dict(each.state_dict())
                module.load_state_dict(state)
        train(x)
        step(x)
        assert equal(tensors_of(other, copy), tensors_of(trainer, net))
    assert step.is_recorded
    assert PlayedGraph.made == (0 if HAS_GPU else 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("scaled", [False, True])
def test_optimizers_with_torchs_interface(name, scaled, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", "triton")
    monkeypatch.setattr(tristep.trainer.optim.base, "_is_on_host", lambda tensor: False)
    made = []
    for arguments in ({}, {"capturable": True} if name == "AdamW" else {}):
        net = network()
        optimizer = getattr(tristep.optim, name)(
            [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.2}],
            lr=0.1,
            weight_decay=0.01,
            fused=True,
            **arguments,
        )
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=2, enabled=scaled)

        def train(x, net=net, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        made.append((optimizer, net, scaler, train))
    (optimizer, net, scaler, train), (other, copy, other_scaler, train_copy) = made
    step = other.capture(train_copy, warmup=2)
    for k, x in enumerate(batches(6)):
        if scaled and k == 4:
            x = x * float("inf")
        for each in (optimizer, other):
            each.param_groups[0]["lr"] = 0.1 / (k + 1)
            each.param_groups[1]["weight_decay"] = 0.01 * k
            if name == "AdamW":
                each.param_groups[0]["betas"] = (0.9 - 0.05 * k, 0.99)
        loss, found = train(x), step(x)
        assert step.is_recorded == (k >= 2)
        assert torch.equal(found, loss.detach()) or (found.isnan() and loss.isnan())
        assert equal(copy.parameters(), net.parameters())
        for a, b in zip(copy.parameters(), net.parameters(), strict=True):
            assert other.state[a].keys() == optimizer.state[b].keys()
            assert equal(
                filter(torch.is_tensor, other.state[a].values()), filter(torch.is_tensor, optimizer.state[b].values())
            )
    assert other_scaler.get_scale() == scaler.get_scale()


def test_what_cannot_be_captured_is_refused():
    net = network()
    x = batches(1)[0]
    trainer = Trainer(net, "adam", engine="triton")
    step = trainer.capture(lambda x: net(x).sum(), warmup=2)
    step(x)
    step(x)
    with pytest.raises(RuntimeError, match="has taken no step"):
        step(x)

    def twice(x):
        for _ in range(2):
            trainer.zero_grad()
            net(x).sum().backward()
            trainer.step(1)

    step = trainer.capture(twice, warmup=2)
    step(x)
    step(x)
    with pytest.raises(RuntimeError, match="several steps with one optimizer"):
        step(x)


@pytest.mark.parametrize(("name", "options"), [("soap", {}), ("muon", {"ema_decay": 0.9})], ids=["soap", "ema"])
def test_other_rules_of_whole_tensors_are_refused(name, options):
    with pytest.raises(ValueError, match=r"or Muon or NorMuon without options that change the rule, such as ema_decay"):
        Trainer(network(), name, options, engine="triton").capture(lambda x: x)


def test_schedules_of_numbers_that_a_graph_of_matrices_keeps_are_refused():
    trainer = Trainer(
        network(), "normuon", {"schedules": dict.fromkeys(["momentum", "row_beta"], lambda n: 0.9)}, engine="triton"
    )
    with pytest.raises(ValueError, match=r"with NorMuon and schedules of row_beta: .* step without a graph"):
        trainer.capture(lambda x: x)


@pytest.mark.parametrize("reason", ["rows apart", "transposed", "float64"])
def test_matrices_that_no_kernel_can_walk_are_refused(reason):
    """Before the graph is replayed, as it would take the first learning rate for ever; steps go on without it."""
    weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64 if reason == "float64" else None, device=DEVICE))
    if reason == "transposed":
        weight.data = weight.detach().T.contiguous().T
    options = {"split": "(row part=2) -> part row"} if reason == "rows apart" else {}
    trainer = Trainer([weight], "muon", options, engine="triton")

    def train(x):
        trainer.zero_grad()
        (weight * x).sum().backward()
        trainer.step(1)

    step, x = trainer.capture(train, warmup=2), torch.randn(6, 4, dtype=weight.dtype, device=DEVICE)
    for _ in range(2):
        step(x)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'muon' steps weights of .*\(\(6, 4\), \([41], [16]\)\).* do not capture"):
        step(x)
    assert torch.equal(weight, before)
    train(x)
    assert trainer.optimizer.num_update == 3


def test_a_step_of_matrices_in_another_graph_says_how_it_is_done(monkeypatch):
    net, x = network(), batches(1)[0]
    trainer = Trainer(net, "muon")
    net(x).sum().backward()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"use capture\(function\)"):
        trainer.step(1)
    assert trainer.optimizer.num_update == 0
    assert equal(net.parameters(), before)


def test_norms_of_lists_are_refused_in_a_graph():
    (_, _, _), (trainer, net, train) = pair("adam", {})

    def clipped(x):
        tristep.clip_global_norm([parameter.detach() for parameter in net.parameters()], 1e9, check_isfinite=False)
        return train(x)

    step = trainer.capture(clipped, warmup=2)
    x = batches(1)[0]
    step(x)
    step(x)
    with pytest.raises(RuntimeError, match="use the optimizer's clip_norm"):
        step(x)


# On a GPU only


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # that the graph is empty
def test_captured_by_hand_it_says_how_it_is_done():
    net, x = network(), batches(1)[0]
    trainer = Trainer(net, "adam")
    for _ in range(3):
        trainer.zero_grad()
        net(x).sum().backward()
        trainer.step(1)
    net(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"use capture\(function\)"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        trainer.step(1)


@pytest.mark.skipif(HAS_GPU, reason="writes behind torch's back through NumPy")
def test_gradients_that_torch_has_not_seen_written_are_fresh_once_it_is_told():
    """As of a backward pass in a CUDA graph of the user's."""
    weight = torch.nn.Parameter(torch.zeros(3))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0})
    weight.grad = torch.ones(3)
    trainer.step(1)
    weight.grad.numpy()[:] = 2.0
    with pytest.raises(StaleGradientError, match=r"torch\.autograd\.graph\.increment_version\(gradients\)"):
        trainer.step(1)
    torch.autograd.graph.increment_version([weight.grad])
    trainer.step(1)
    assert weight.tolist() == [-3.0] * 3


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "layout"), [("adafactor", "channels_last"), ("came", "transposed"), ("groupadagrad", "transposed")]
)
def test_weights_whose_rows_are_apart_are_refused_by_name_and_contiguous_ones_are_not(name, layout):
    """Before the graph is replayed, as its kernels would take the first learning rate for ever; steps go on without it."""
    for is_strided in (True, False):
        torch.manual_seed(0)
        layers = {"channels_last": torch.nn.Conv2d(2, 3, 3, bias=False), "transposed": torch.nn.Linear(4, 2, bias=False)}
        net = torch.nn.Sequential(layers[layout]).to(DEVICE)
        if is_strided and layout == "channels_last":
            net = net.to(memory_format=torch.channels_last)
        elif is_strided:
            net[0].weight.data = net[0].weight.detach().T.contiguous().T
        trainer = Trainer(net, name, {"learning_rate": 0.01}, engine="triton")

        def train(x, net=net, trainer=trainer):
            trainer.zero_grad()
            net(x).square().mean().backward()
            trainer.step(1)

        step, x = trainer.capture(train, warmup=2), torch.randn(4, 2, 4, 4, device=DEVICE)
        for _ in range(2):
            step(x)
        before = [param.detach().clone() for param in net.parameters()]
        if not is_strided:
            step(x)
            assert step.is_recorded
            assert not equal(net.parameters(), before)
            continue
        named = {"channels_last": r"^'0\.weight' \(shape \(3, 2, 3, 3\)", "transposed": r"^'0\.weight' \(shape \(2, 4\)"}
        with pytest.raises(RuntimeError, match=named[layout] + r".*make the optimizer of weights that are .contiguous\(\)"):
            step(x)
        assert equal(net.parameters(), before)
        train(x)
        assert not equal(net.parameters(), before)
