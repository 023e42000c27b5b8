"""tristep.integrations.huggingface in the Trainer itself, against loops that use torch.optim."""

import sys
from pathlib import Path

import pytest
import torch

import tristep

STEPS, RATE, DECAY = 4, 0.01, 0.1
ENTRIES = [("ndim<2|*wte*|*wpe*", "adamw"), ("*", "sgd", {"lr": 0.05, "momentum": 0.9})]


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        # `python -m pytest` makes the repository's folder `kernels` look like the package of that name, used if found.
        root = Path(__file__).parents[2]
        patch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != root])
        pytest.importorskip("accelerate", reason="not installed")
        module = pytest.importorskip("transformers", reason="not installed")
        module.utils.logging.disable_progress_bar()
        yield module
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def _model(transformers):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 11}
    others = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    # Biases of keys have gradients of 0 but for rounding errors, which Adam enlarges; hence float64.
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **others)).double()


def _sentences():
    """One batch, so that each step has the same."""
    tokens = [(torch.arange(6) * (i % 3 + 1) + i) % 11 for i in range(4)]
    ignored = torch.tensor([-100])  # the first, which nothing predicts, or the Trainer counts it as one of the labels
    return [{"input_ids": each, "labels": torch.cat([ignored, each[1:]])} for each in tokens]


def _arguments(transformers, folder, steps=STEPS, **settings):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=RATE,
        weight_decay=DECAY,
        adam_beta2=0.95,
        max_grad_norm=0.0,
        lr_scheduler_type="linear",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **settings},
    )


def _plain_loop(model):
    """What the Trainer should do with ENTRIES: torch.optim's own classes, groups by hand; with losses and gradient norms."""
    groups = {(matrix, spared): [] for matrix in (False, True) for spared in (False, True)}
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and "wte" not in name and "wpe" not in name
        groups[matrix, "bias" in name or "ln_" in name].append(parameter)
    assert [len(each) for each in groups.values()] == [2, 10, 4, 0]
    adamw = [{"params": groups[False, spared], "weight_decay": 0.0 if spared else DECAY} for spared in (False, True)]
    optimizers = [
        torch.optim.AdamW(adamw, lr=RATE, betas=(0.9, 0.95)),
        torch.optim.SGD(groups[True, False], lr=0.05, momentum=0.9, weight_decay=DECAY),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / STEPS) for each in optimizers]
    batch = {name: torch.stack([each[name] for each in _sentences()]) for name in ("input_ids", "labels")}
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append([parameter.grad.norm().item() for parameter in model.parameters()])
        for each in (*optimizers, *schedules):
            each.step()
    return losses, norms


@pytest.mark.sample(1)
def test_several_optimizers_and_the_callback_equal_a_plain_loop(transformers, tmp_path):
    from tristep.integrations.huggingface import TristepCallback, optimizer_cls_and_kwargs

    plain = _model(transformers)
    losses, norms = _plain_loop(plain)
    args = _arguments(transformers, tmp_path)
    callback = TristepCallback("gpt", every=1)
    trainer = transformers.Trainer(
        model=_model(transformers),
        args=args,
        train_dataset=_sentences(),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, ENTRIES),
        callbacks=[callback],
    )
    trainer.train()
    torch.testing.assert_close(trainer.model.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-9)

    run = callback.run
    steps, found = run.scalars["loss"].recent()
    assert steps.tolist() == [1, 2, 3, 4]
    torch.testing.assert_close(found.tolist(), losses, rtol=1e-6, atol=0.0)
    rates = run.scalars["learning_rate"].recent()[1]
    torch.testing.assert_close(rates.tolist(), [RATE * (1 - step / STEPS) for step in range(STEPS)])
    order = [name for name, _ in plain.named_parameters()]
    assert sorted(run.parameters) == sorted(order)
    columns = [run.parameters.index(name) for name in order]
    found = torch.from_numpy(run.tensors["gradient_norm"].recent()[1][:, columns])
    torch.testing.assert_close(found, torch.tensor(norms), rtol=1e-4, atol=1e-8)
    assert callback.view is None  # there is no notebook
    assert "epoch" in run.scalars
    assert not {"train_loss", "train_runtime", "total_flos"} & set(run.scalars)


@pytest.mark.sample(0)
def test_resumes_with_several_optimizers(transformers, tmp_path):
    from tristep.integrations.huggingface import TristepCallback, optimizer_cls_and_kwargs

    def train(folder, steps, resume=None, **settings):
        args = _arguments(transformers, folder, steps, warmup_steps=0, **settings)
        args.lr_scheduler_type = "constant"
        callback = TristepCallback(view=None)
        given = {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args, ENTRIES), "callbacks": [callback]}
        trainer = transformers.Trainer(model=_model(transformers), args=args, train_dataset=_sentences(), **given)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model, callback.run

    whole, _ = train(tmp_path / "whole", 6)
    train(tmp_path / "half", 3, save_strategy="steps", save_steps=3)
    resumed, run = train(tmp_path / "rest", 6, resume=str(tmp_path / "half" / "checkpoint-3"))
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    assert run.scalars["loss"].recent()[0].tolist() == [4, 5, 6]


@pytest.mark.sample(0)
def test_one_optimizer_keeps_the_trainers_groups(transformers, tmp_path):
    """By its name the class with the numbers of the arguments, which the Trainer itself gives groups."""
    from tristep.integrations.huggingface import optimizer_cls_and_kwargs

    args = _arguments(transformers, tmp_path, optim="adamw_torch")
    models = []
    for given in ({}, {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args)}):
        trainer = transformers.Trainer(model=_model(transformers), args=args, train_dataset=_sentences(), **given)
        trainer.train()
        models.append(trainer.model)
    assert type(trainer.optimizer.optimizer) is tristep.optim.AdamW
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-6, atol=1e-9)


def _created(transformers, folder, model, *arguments, **options):
    """The optimizer that the Trainer creates."""
    from tristep.integrations.huggingface import optimizer_cls_and_kwargs

    args = _arguments(transformers, folder)
    made = optimizer_cls_and_kwargs(args, *arguments, **options)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=_sentences(), optimizer_cls_and_kwargs=made)
    return trainer.create_optimizer()


def test_weight_decay_of_options_and_entries(transformers, tmp_path):
    optimizer = _created(transformers, tmp_path, _model(transformers), "lion", weight_decay=0.3)
    assert {row[4] for row in optimizer.table()[1:] if "bias" in row[0] or "ln_" in row[0]} == {"0"}
    assert {row[4] for row in optimizer.table()[1:] if not ("bias" in row[0] or "ln_" in row[0])} == {"0.3"}
    # Rprop has no weight decay at all; an entry's own replaces that of the arguments.
    entries = [("*ln_*", "rprop"), ("ndim<2", "adam"), ("*", "lion", {"weight_decay": 0.2})]
    optimizer = _created(transformers, tmp_path, _model(transformers), entries)
    assert {(row[2], row[4]) for row in optimizer.table()[1:]} == {("Rprop", ""), ("Adam", "0"), ("Lion", "0.2")}


def test_frozen_parameters_have_no_optimizer(transformers, tmp_path):
    model = _model(transformers)
    model.transformer.wte.weight.requires_grad_(False)
    optimizer = _created(transformers, tmp_path, model, ENTRIES)
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_trainer_evaluates_averages_and_trains_on(transformers, tmp_path):
    """It calls `eval()` and `train()` of the optimizer, through Accelerate's."""
    losses, weights = [], []
    for evaluated in (True, False):
        model = _model(transformers)
        optimizer = tristep.optim.ScheduleFreeAdamW(model.parameters(), lr=RATE)
        if evaluated:
            settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
            trainer = transformers.Trainer(
                model,
                _arguments(transformers, tmp_path, **settings),
                train_dataset=_sentences(),
                eval_dataset=_sentences(),
                optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            )
            trainer.train()
            losses.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
            optimizer.train()
        else:
            batch = {name: torch.stack([each[name] for each in _sentences()]) for name in ("input_ids", "labels")}
            losses.append([])
            for step in range(1, STEPS + 1):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
                if step % 2 == 0:
                    with optimizer.averaged_weights(), torch.no_grad():
                        losses[-1].append(model(**batch).loss.item())
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for found, expected in zip(*weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
