"""tristep.optim in Lightning, Accelerate and Hugging Face's Trainer: short trainings on the CPU against torch.optim's."""

import sys
from pathlib import Path

import pytest
import torch

import tristep

LIBRARIES = [torch.optim, tristep.optim]


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def _data():
    torch.manual_seed(1)
    x = torch.randn(24, 4)
    return torch.utils.data.TensorDataset(x, x[:, :2] * 2 - x[:, 2:])


def _loader():
    return torch.utils.data.DataLoader(_data(), batch_size=4)


def _moved(net):
    """Whether training has changed it at all."""
    return not torch.equal(next(net.parameters()), next(_net().parameters()))


# Lightning


def _lightning_module(lightning, library):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = _net()

        def training_step(self, batch, _):
            x, y = batch
            return torch.nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            optimizer = library.AdamW(self.parameters(), lr=0.02, amsgrad=True, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=24)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def _fit(lightning, library, folder, epochs, resume=None, **settings):
    module = _lightning_module(lightning, library)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        **settings,
    )
    trainer.fit(module, _loader(), ckpt_path=resume)
    return module, trainer


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning", reason="not installed")


quiet_lightning = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*does not have many workers",  # as it says on machines of more cores
    "ignore:GPU available but not used",
)


def _same_after_all(ours, theirs, resumed):
    """Check weights against torch's training, and against those resumed halfway: by torch, and by tristep to the bit."""
    for other in (theirs, resumed[torch.optim]):
        torch.testing.assert_close(ours.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, ours.parameters(), resumed[tristep.optim].parameters()))


@quiet_lightning
def test_lightning_trains_and_resumes(lightning, tmp_path):
    theirs, _ = _fit(lightning, torch.optim, tmp_path, 4)
    ours, trainer = _fit(lightning, tristep.optim, tmp_path, 4)
    assert trainer.global_step == 12
    assert {row["step"].item() for row in trainer.optimizers[0].state.values()} == {12.0}
    resumed = {}
    for started_by in LIBRARIES:
        _, trainer = _fit(lightning, started_by, tmp_path, 2)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        resumed[started_by] = _fit(lightning, tristep.optim, tmp_path, 4, resume=tmp_path / "half.ckpt")[0].net
    assert _moved(ours.net)
    _same_after_all(ours.net, theirs.net, resumed)


@quiet_lightning
def test_lightning_in_bfloat16(lightning, tmp_path):
    theirs, _ = _fit(lightning, torch.optim, tmp_path, 2, precision="bf16-mixed")
    ours, _ = _fit(lightning, tristep.optim, tmp_path, 2, precision="bf16-mixed")
    assert _moved(ours.net)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0.02, atol=0.002)


# Accelerate


@pytest.fixture
def accelerate():
    module = pytest.importorskip("accelerate", reason="not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield module
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _accelerated(accelerate, library, epochs, load=None, save=None, **settings):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    net = _net()
    optimizer = library.Adam(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, _loader(), scheduler)
    if load is not None:
        accelerator.load_state(load)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    return accelerator.unwrap_model(net, keep_torch_compile=False)


def test_accelerate_in_bfloat16(accelerate):
    theirs, ours = (_accelerated(accelerate, library, 2, mixed_precision="bf16") for library in LIBRARIES)
    assert _moved(ours)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0.02, atol=0.002)


def test_accelerate_trains_and_resumes(accelerate, tmp_path):
    theirs, ours = (_accelerated(accelerate, library, 4) for library in LIBRARIES)
    resumed = {}
    for started_by in LIBRARIES:
        _accelerated(accelerate, started_by, 2, save=tmp_path / started_by.__name__)
        resumed[started_by] = _accelerated(accelerate, tristep.optim, 2, load=tmp_path / started_by.__name__)
    assert _moved(ours)
    _same_after_all(ours, theirs, resumed)


# Hugging Face's Trainer


@pytest.fixture
def transformers(accelerate, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # `python -m pytest` makes the repository's folder `kernels` look like the package of that name, which is used if found.
    root = Path(__file__).parents[2]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != root])
    module = pytest.importorskip("transformers", reason="not installed")
    module.utils.logging.disable_progress_bar()
    return module


def _language_model(transformers):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 11}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    # Some of its biases have gradients of 0 but for rounding errors, which Adam enlarges; hence float64.
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, **none)).double()


class _Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        tokens = (torch.arange(6) * (i % 3 + 1) + i) % 11
        return {"input_ids": tokens, "labels": tokens}


def _taught(transformers, library, folder, steps, as_class=False, resume=None, **settings):
    model = _language_model(transformers)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        weight_decay=0.1,
        save_strategy="steps" if "save_steps" in settings else "no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
        lr_scheduler_type="constant",
        **settings,
    )
    if as_class:
        given = {"optimizer_cls_and_kwargs": (library.AdamW, {"lr": 0.01})}
    else:
        optimizer = library.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        given = {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))}
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=_Sentences(), **given)
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.sample(0)
def test_transformers_given_a_class(transformers, tmp_path):
    models = [_taught(transformers, library, tmp_path, 6, as_class=True) for library in LIBRARIES]
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-4, atol=1e-5)


def test_transformers_trains_and_resumes(transformers, tmp_path):
    theirs, ours = (_taught(transformers, library, tmp_path / "whole", 6) for library in LIBRARIES)
    assert not torch.equal(ours.lm_head.weight, _language_model(transformers).lm_head.weight)
    resumed = {}
    for started_by in LIBRARIES:
        half = tmp_path / started_by.__name__
        _taught(transformers, started_by, half, 3, save_steps=3)
        resumed[started_by] = _taught(transformers, tristep.optim, tmp_path / "rest", 6, resume=str(half / "checkpoint-3"))
    _same_after_all(ours, theirs, resumed)
