"""docs/plugins.md, tried: who imports the module of the page finds its names."""

import re
import textwrap
from pathlib import Path

import pytest
from interpreters import run

pytestmark = pytest.mark.packaging

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
MODULE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
MAKE = """
    import torch, tristep
    weight = torch.nn.Parameter(torch.ones(2))
"""


@pytest.fixture(autouse=True)
def module(tmp_path):
    (tmp_path / "tristep_tempered.py").write_text(MODULE, encoding="utf-8")


def _run(code, tmp_path):
    return run(textwrap.dedent(MAKE) + textwrap.dedent(code), tmp_path)


def test_the_names_of_the_page_are_found_after_the_import(tmp_path):
    code = """
        import tristep_tempered
        weight = torch.nn.Parameter(torch.full((2,), 4.0))
        trainer = tristep.Trainer([weight], "tempered", {"learning_rate": 1.0}, engine="eager")
        weight.grad = torch.full((2,), 3.0)
        trainer.step(1)
        print(weight.tolist())  # 4 - 3 / (3 + 1)
        weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        for name, options in (("sgd", {}), ("adamw", {"ema_decay": 0.5, "clip_norm": 1.0})):
            trainer = tristep.Trainer([weight], name, {"learning_rate": 1.0, "smallest": -0.5, **options}, engine="eager")
            weight.grad = torch.tensor([5.0, 0.0])
            trainer.step(1)
            print(weight.tolist(), trainer.optimizer.smallest)
            trainer.save_states("states")
            other = tristep.Trainer([weight], name, {"learning_rate": 1.0, **options}, engine="eager")
            other.load_states("states")
            print(repr(other.optimizer).count("smallest=-0.5"))
        print("tempered" in tristep.optimizer.registered())
    """
    assert _run(code, tmp_path) == ["[3.25, 3.25]", "[-0.5, -0.5] -0.5", "1", "[-0.5, -0.5] -0.5", "1", "True"]


def test_an_option_is_loaded_in_another_process_once_it_is_registered(tmp_path):
    code = """
        import tristep_tempered
        trainer = tristep.Trainer([weight], "sgd", {"smallest": 0.5}, engine="eager")
        weight.grad = torch.ones(2)
        trainer.step(1)
        trainer.save_states("states")
    """
    assert _run(code, tmp_path) == []
    code = """
        trainer = tristep.Trainer([weight], "sgd", engine="eager")
        try:
            trainer.load_states("states")
        except ValueError as error:
            print(error)
        import tristep_tempered
        trainer.load_states("states")
        print(trainer.optimizer.smallest, trainer.optimizer.composed_rule.name)
    """
    unknown, found = _run(code, tmp_path)
    assert "SGD does not know: smallest" in unknown
    assert found == "0.5 sgd_not_below"
