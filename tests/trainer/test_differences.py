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

from tristep import Trainer, lr_scheduler, optimizer
from tristep.trainer.optimizer import NAG, SGD, AdaGrad, Adam, AdamW, Optimizer, RMSProp, Signum, get_updater, registered

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
    weight = torch.full((5,), 3.0, dtype=dtype, device=device)
    updater = get_updater(optimizer.create(name, learning_rate=0.125))
    for _ in range(20):
        updater(0, weight.clone(), weight)  # the gradient of w**2 / 2
    assert weight.dtype == dtype
    assert (weight.abs() < 2.9).all()


def test_hyper_parameters_of_float64_weights_are_not_rounded(engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    weight = torch.ones(3, dtype=torch.float64, device=device)
    get_updater(SGD(learning_rate=0.1))(0, torch.ones_like(weight), weight)
    assert weight.tolist() == [1 - 0.1] * 3
    assert abs(0.1 - float(np.float32(0.1))) > 1e-9  # what rounding would have changed


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_counts_go_with_the_parameter_to_another_device():
    """In MXNet t starts anew, and num_update stands still until the new counts overtake it."""
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
    for make in (SGD, NAG, Signum, Adam, AdamW, AdaGrad, RMSProp):
        assert make(0.75).learning_rate == 0.75


def test_arguments_of_the_base_class_are_given_by_name():
    parameters = list(inspect.signature(Optimizer).parameters.values())
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    with pytest.raises(TypeError, match="positional arguments"):
        SGD(0.1, 0.9, True, 1.0)
    with pytest.raises(TypeError, match="SGD has no argument 'sym'"):
        SGD(sym=None)


def test_the_registry_is_functions_of_the_module():
    assert callable(optimizer.register)
    assert callable(optimizer.create)
    assert not {"register", "create_optimizer"} & set(dir(Optimizer))


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
