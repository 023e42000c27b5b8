"""Type checkers and editors, which run nothing, find the names that users import, with their types."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tristep

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

SOURCES = Path(tristep.__file__).parents[1]
MODULES = ["amp", "init", "initializer", "kv", "kvstore", "lr_scheduler", "optim", "optimizer"]
USER = """
import torch
import tristep
from tristep import optimizer
from tristep.optim import AdamW, Lion, Muon

net = torch.nn.Linear(2, 2)
lion: Lion = Lion(net.parameters(), lr=1e-4, beta1=0.95)
reveal_type(AdamW(net.parameters()))
reveal_type(Muon(net.parameters(), lr=0.1))
reveal_type(tristep.optim.as_torch(optimizer.SGD)(net.parameters()).param_groups)
reveal_type(optimizer.SGD())
reveal_type(tristep.optimizer.Muon())
reveal_type(tristep.lr_scheduler.FactorScheduler(10))
reveal_type(tristep.kv.create())
reveal_type(tristep.Trainer(net, "adamw"))
reveal_type(tristep.init.Xavier())
"""
REVEALED = [
    "tristep.trainer.optim.ports.AdamW",
    "tristep.trainer.optim.ports.Muon",
    "list[dict[str, Any]]",
    "tristep.trainer.optimizer.gradient_descent.SGD",
    "tristep.trainer.optimizer.muon.Muon",
    "tristep.trainer.lr_scheduler.mxnet.FactorScheduler",
    "tristep.trainer.kvstore.base.KVStore",
    "tristep.trainer.trainer.Trainer",
    "tristep.trainer.initializer.basic.Xavier",
]
WRONG = "tristep.Trianer\ntristep.optim.Lino\nlion = Lion(net.parameters(), lr='high')\n"


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    """A script that imports every name of every public module, says the types of some, and makes three mistakes."""
    path = tmp_path_factory.mktemp("user") / "script.py"
    imports = [
        f"from tristep.{module} import {name} as {module}_{name}\n"
        for module in MODULES
        for name in import_module(f"tristep.{module}").__all__
    ]
    assert len(imports) > 150
    not_made = ("FusedOptimizer", "MultiOptimizer", "SAM")
    optimizers = [name for name in tristep.optim.__all__ if name[0].isupper() and name not in not_made]
    made = [f"optim_{name}(net.parameters(), lr=0.1)\n" for name in optimizers]
    path.write_text("".join(imports) + USER + "".join(made) + WRONG, encoding="utf-8")
    return path


@pytest.mark.sample(0)
def test_mypy_knows_the_public_names_and_their_types(user_file):
    pytest.importorskip("mypy")
    cache = Path(os.environ["XDG_CACHE_HOME"], "mypy-of-users")
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--config-file="]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", cache, user_file.name]
    done = subprocess.run(
        command,
        cwd=user_file.parent,
        env=os.environ | {"MYPYPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith(user_file.name)]
    assert [line for line in lines if line.startswith("note")] == [f'note: Revealed type is "{each}"' for each in REVEALED]
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 3, done.stdout + done.stderr
    for error, words in zip(errors, ("Trianer", "Lino", '"lr" to "Lion" has incompatible type "str"'), strict=True):
        assert words in error
