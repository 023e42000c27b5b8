"""tristep.integrations.lightning in Lightning's Trainer, against a plain loop."""

import pytest
import torch

import tristep

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*does not have many workers",  # as it says on machines of more cores
    "ignore:GPU available but not used",
)
ACCUMULATED = 2


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning", reason="not installed")


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def _batches():
    torch.manual_seed(1)
    return [(x, x[:, :2] * 2 - x[:, 2:]) for x in torch.randn(6, 4, 4)]


def _fit(lightning, folder, callback, epochs=2, resume=None, fails_at=None):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = _net()

        def training_step(self, batch, index):
            if fails_at == (self.current_epoch, index):
                raise RuntimeError("on purpose")
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            optimizer = tristep.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[callback],
        **quiet,
    )
    module = Module()
    loaders = [torch.utils.data.DataLoader(batches, batch_size=None) for batches in (_batches(), _batches()[:2])]
    trainer.fit(module, *loaders, ckpt_path=resume)
    return module, trainer


def _plain_loop(epochs=2):
    """The losses, rates, gradient norms and losses of validation of the same training, by torch alone."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses, rates, norms, held_out = [], [], [], []
    mse = torch.nn.functional.mse_loss
    for _ in range(epochs):
        batches = _batches()
        for k in range(0, len(batches), ACCUMULATED):
            loss = sum(mse(net(x), y) for x, y in batches[k : k + ACCUMULATED]) / ACCUMULATED
            net.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = 0.1 * 0.9 ** len(losses)
            optimizer.step()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            norms.append([parameter.grad.norm().item() for parameter in net.parameters()])
        with torch.no_grad():
            held_out.append(sum(mse(net(x), y).item() for x, y in batches[:2]) / 2)
    return net, losses, rates, norms, held_out


def test_the_callback_records_a_plain_loop(lightning, tmp_path):
    from tristep.integrations.lightning import TristepCallback

    callback = TristepCallback("net", every=1)
    module, trainer = _fit(lightning, tmp_path, callback)
    net, losses, rates, norms, held_out = _plain_loop()
    torch.testing.assert_close(module.net.state_dict(), net.state_dict())

    run = callback.run
    steps, found = run.scalars["loss"].recent()
    assert steps.tolist() == list(range(1, 7))
    torch.testing.assert_close(found.tolist(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.scalars["learning_rate"].recent()[1].tolist(), rates)
    steps, found = run.scalars["val_loss"].recent()
    assert steps.tolist() == [3, 6]
    torch.testing.assert_close(found.tolist(), held_out, rtol=1e-5, atol=1e-6)
    assert run.parameters == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    found = torch.from_numpy(run.tensors["gradient_norm"].recent()[1])
    torch.testing.assert_close(found, torch.tensor(norms), rtol=1e-4, atol=1e-5)
    assert callback.view is None  # there is no notebook

    trainer.optimizers[0].step()  # nobody records any more
    assert callback.run.last_step == 6


def test_after_a_checkpoint_steps_go_on(lightning, tmp_path):
    from tristep.integrations.lightning import TristepCallback

    _, trainer = _fit(lightning, tmp_path, TristepCallback(view=None), epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    callback = TristepCallback(view=None)
    _fit(lightning, tmp_path, callback, resume=tmp_path / "half.ckpt")
    steps, found = callback.run.scalars["loss"].recent()
    assert steps.tolist() == [4, 5, 6]
    torch.testing.assert_close(found.tolist(), _plain_loop()[1][3:], rtol=1e-5, atol=1e-6)


def test_what_was_recorded_before_an_exception_is_kept(lightning, tmp_path):
    from tristep.integrations.lightning import TristepCallback

    callback = TristepCallback()
    with pytest.raises(RuntimeError, match="on purpose"):
        _fit(lightning, tmp_path, callback, fails_at=(0, 3))
    assert callback.run.scalars["loss"].recent()[0].tolist() == [1]
