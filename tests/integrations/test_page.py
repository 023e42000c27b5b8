"""The examples in docs/integrations.md run, with the libraries themselves, and are short."""

import re
import sys
from pathlib import Path

import pytest
import torch

import tristep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"<!-- (\w+) -->\n```diff\n(.*?)```", PAGE, re.DOTALL))


def _run(name, names, without="-"):
    """What the example defines, with its new lines; or with the old ones, without "+"."""
    code = "\n".join(line[1:] for line in DIFFS[name].splitlines() if not line.startswith(without))
    exec(compile(code, f"<docs/integrations.md, {name}>", "exec"), names)
    return names


def _batches():
    torch.manual_seed(0)
    return torch.utils.data.DataLoader([(x, x[:2]) for x in torch.randn(12, 4)], batch_size=4)


@pytest.mark.sample(0)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_huggingface(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # `python -m pytest` makes the repository's folder `kernels` look like the package of that name, used if found.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
    transformers = pytest.importorskip("transformers", reason="not installed")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 11}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": torch.arange(6) + i % 5, "labels": torch.arange(6) + i % 5} for i in range(16)]
    names = _run("huggingface", {"model": model, "data": data, "folder": str(tmp_path)})
    assert names["callback"].run.scalars["loss"].recent()[0].tolist() == [1, 2]
    assert {type(each).__name__ for each in names["trainer"].optimizer.optimizer.optimizers} == {"AdamW", "Muon"}


@pytest.mark.sample(0)
@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:GPU available but not used",
    "ignore:The number of training batches",
)
def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason="not installed")
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "logger": False}
    options |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    names = _run("lightning", {"torch": torch, "options": options, "loader": _batches()})
    assert names["callback"].run.scalars["loss"].recent()[0].tolist() == [1, 2, 3]


def test_accelerate():
    pytest.importorskip("accelerate", reason="not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = {"torch": torch, "net": torch.nn.Linear(4, 2), "loader": _batches(), "options": {"cpu": True}}
    try:
        _run("accelerate", names)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    run = names["recorder"].run
    assert run.scalars["loss"].recent()[0].tolist() == [1, 2, 3]
    assert run.parameters == ["weight", "bias"]


def test_skorch(capsys):
    """With the numbers of torch's class."""
    pytest.importorskip("skorch", reason="not installed")
    x, nets = torch.randn(20, 4).numpy(), []
    for without in ("-", "+"):
        torch.manual_seed(0)
        given = {"torch": torch, "module": torch.nn.Linear(4, 2), "x": x, "y": x[:, :2]}
        nets.append(_run("skorch", given, without)["net"])
    assert [type(net.optimizer_) for net in nets] == [tristep.optim.AdamW, torch.optim.AdamW]
    torch.testing.assert_close(*(net.module_.state_dict() for net in nets), rtol=1e-4, atol=1e-6)
    torch.manual_seed(0)
    assert not torch.equal(nets[0].module_.weight, torch.nn.Linear(4, 2).weight)
