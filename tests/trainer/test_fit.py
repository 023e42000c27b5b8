"""`fit`: the same training as by hand, its report, and how it ends early."""

import itertools
import signal

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer, fit, lr_scheduler

CROSS_ENTROPY = torch.nn.functional.cross_entropy


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


@pytest.fixture
def data():
    """Four batches of 8 and one of 5; the label is the largest of three inputs."""
    rng = torch.Generator().manual_seed(1)
    batches = [torch.rand(size, 4, generator=rng) for size in (8, 8, 8, 8, 5)]
    return [(x, x[:, :3].argmax(dim=1)) for x in batches]


def _by_hand(data, epochs, reduction):
    net = _net()
    trainer = Trainer(net, "adam", {"learning_rate": 0.05})
    losses = []
    for _ in range(epochs):
        for x, y in data:
            trainer.zero_grad()
            loss = CROSS_ENTROPY(net(x), y, reduction="mean" if reduction == "mean" else "sum")
            loss.backward()
            trainer.step(1 if reduction == "mean" else len(x))
            losses.append(loss.item() / (1 if reduction == "mean" else len(x)))
    return net, losses


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_trains_as_a_loop_by_hand(data, reduction):
    net = _net()
    done = fit(
        net,
        torch.nn.CrossEntropyLoss(reduction=reduction),
        data,
        optimizer="adam",
        optimizer_params=[("learning_rate", 0.05)],
        epochs=3,
        progress=False,
    )
    expected, losses = _by_hand(data, 3, reduction)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected.parameters(), strict=True))
    np.testing.assert_allclose(done.losses, losses, rtol=1e-6)
    assert [epoch["epoch"] for epoch in done.epochs] == [1, 2, 3]
    assert not done.interrupted
    assert done.epochs[2]["loss"] < done.epochs[0]["loss"]


def test_means_are_over_samples_and_not_over_batches(data):
    net = _net()
    done = fit(
        net,
        CROSS_ENTROPY,
        data,
        optimizer_params={"learning_rate": 0.0},
        eval_data=data[3:],
        eval_metric="acc",
        progress=False,
    )
    (epoch,) = done.epochs
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    few_x, few_y = (torch.cat(parts) for parts in zip(*data[3:], strict=True))
    with torch.no_grad():
        outputs, few = net(x).double().numpy(), net(few_x).double().numpy()
    assert epoch["accuracy"] == pytest.approx((outputs.argmax(1) == y.numpy()).mean())
    assert epoch["eval_accuracy"] == pytest.approx((few.argmax(1) == few_y.numpy()).mean())
    for name, values, labels in (("loss", outputs, y), ("eval_loss", few, few_y)):
        log_sum = np.log(np.exp(values).sum(axis=1))
        assert epoch[name] == pytest.approx((log_sum - values[np.arange(len(values)), labels]).mean(), rel=1e-6)


def test_several_metrics_and_one_of_ones_own():
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    data = [(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [9.0]]))]

    def largest(labels, outputs):
        return (labels - outputs).abs().max()

    done = fit(
        net,
        torch.nn.MSELoss(),
        data,
        optimizer_params={"learning_rate": 0.0},
        eval_metric=["mse", "mae", largest],
        progress=False,
    )
    found = {name: done.epochs[0][name] for name in ("loss", "mse", "mae", "largest")}
    assert found == pytest.approx({"loss": 4.0, "mse": 4.0, "mae": 2.0, "largest": 2.0})


def test_evaluation_is_without_gradients_and_dropout_and_changes_nothing(data):
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
    seen = []

    def loss(outputs, labels):
        seen.append((net.training, outputs.requires_grad))
        return CROSS_ENTROPY(outputs, labels)

    fit(net, loss, data[:1], eval_data=data[:1], progress=False)
    assert seen == [(True, True), (False, False)]
    assert net.training


def test_a_schedule_counts_batches(data):
    schedule = lr_scheduler.FactorScheduler(step=5, factor=0.5, base_lr=0.1)
    done = fit(_net(), CROSS_ENTROPY, data, lr_scheduler=schedule, epochs=3, progress=False)
    assert [epoch["learning_rate"] for epoch in done.epochs] == pytest.approx([schedule(n) for n in (5, 10, 15)])


def test_going_on_is_as_if_it_had_not_stopped(data):
    whole, parts = _net(), _net()
    arguments = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}}
    fit(whole, CROSS_ENTROPY, data, epochs=4, progress=False, **arguments)
    first = fit(parts, CROSS_ENTROPY, data, epochs=2, progress=False, **arguments)
    second = fit(parts, CROSS_ENTROPY, data, epochs=4, begin_epoch=2, trainer=first.trainer, progress=False)
    assert [epoch["epoch"] for epoch in second.epochs] == [3, 4]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_an_initializer_comes_first(data):
    net = _net()
    fit(net, CROSS_ENTROPY, data[:1], initializer="zeros", optimizer_params={"learning_rate": 0.0}, progress=False)
    assert all(not parameter.any() for parameter in net.parameters())


def test_several_inputs_and_a_data_loader():
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, a, b):
            return self.scale * (a + b)

    samples = [((torch.tensor([1.0]), torch.tensor([2.0])), torch.tensor([6.0]))] * 4
    net = Sum()
    done = fit(
        net,
        torch.nn.MSELoss(),
        torch.utils.data.DataLoader(samples, batch_size=2),
        optimizer_params={"learning_rate": 0.05},
        epochs=20,
        progress=False,
    )
    assert net.scale.item() == pytest.approx(2.0, abs=1e-3)
    assert len(done.losses) == 40


def test_callbacks_are_told_and_may_end_it(data):
    told = []

    def note(batch):
        told.append((batch.epoch, batch.batch, batch.loss))

    def enough(done):
        return len(done.epochs) == 2

    done = fit(_net(), CROSS_ENTROPY, data, epochs=5, batch_end_callback=[note], epoch_end_callback=enough, progress=False)
    assert [(epoch, batch) for epoch, batch, _ in told] == [(e, b) for e in range(2) for b in range(5)]
    assert [loss for *_, loss in told] == done.losses
    assert len(done.epochs) == 2
    assert done.interrupted


def test_a_first_interrupt_ends_after_the_batch_with_a_usable_state(data):
    net, handler, count = _net(), signal.getsignal(signal.SIGINT), itertools.count(1)
    hook = net[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT) if next(count) == 8 else None)
    arguments = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.05}}
    done = fit(net, CROSS_ENTROPY, data, epochs=5, progress=False, **arguments)
    hook.remove()
    assert done.interrupted
    assert len(done.epochs) == 1
    assert len(done.losses) == 8
    assert done.trainer.optimizer.num_update == 8
    assert signal.getsignal(signal.SIGINT) is handler
    fit(net, CROSS_ENTROPY, data, trainer=done.trainer, progress=False)
    assert done.trainer.optimizer.num_update == 13


def test_a_second_interrupt_raises(data):
    handler = signal.getsignal(signal.SIGINT)

    def interrupt_twice(batch):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(_net(), CROSS_ENTROPY, data, batch_end_callback=interrupt_twice, progress=False)
    assert signal.getsignal(signal.SIGINT) is handler


BAD = {
    "an iterator": ({"data": iter([])}, TypeError, "data is an iterator"),
    "two schedules": (
        {"lr_scheduler": lambda n: 0.1, "optimizer_params": {"lr_scheduler": lambda n: 0.1}},
        ValueError,
        "lr_scheduler is given twice",
    ),
    "a schedule together with an optimizer": (
        {"lr_scheduler": lambda n: 0.1, "optimizer": tristep.optimizer.create("sgd")},
        ValueError,
        "lr_scheduler together with an Optimizer",
    ),
    "a loss that is no tensor": (
        {"loss": lambda outputs, labels: 3},
        TypeError,
        r"loss gave 3 \(int\): it must give a tensor, one number for each sample, or their mean",
    ),
    "a loss of another shape": (
        {"loss": lambda outputs, labels: outputs},
        ValueError,
        r"loss gave shape \(8, 3\) for a batch of 8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named_and_changes_no_weight(name, data):
    arguments, error, message = BAD[name]
    net = _net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    given = {"net": net, "loss": CROSS_ENTROPY, "data": data, "progress": False} | arguments
    with pytest.raises(error, match=message):
        fit(**given)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


def test_a_trainer_of_ones_own_excludes_what_would_make_another(data):
    net = _net()
    trainer = Trainer(net, "sgd")
    with pytest.raises(ValueError, match="trainer is used as it is"):
        fit(net, CROSS_ENTROPY, data, trainer=trainer, optimizer_params={"learning_rate": 1.0})
