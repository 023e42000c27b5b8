"""What runs where nothing but tristep's own requirements is installed, in their least versions: `make test-floor` runs it.

Without pytest, which is none of them.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

import tristep

NAMES = ("torch", "numpy", "numba", "safetensors", "packaging", "tqdm")


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(net, step, steps=5):
    for k in range(steps):
        net.zero_grad()
        net(torch.full((3, 4), 0.1 * k)).square().mean().backward()
        step()


def compare(name):
    """An optimizer of `tristep.optim` gives the weights of torch's."""
    ours, theirs = network(), network()
    train(ours, getattr(tristep.optim, name)(ours.parameters(), lr=0.01).step)
    train(theirs, getattr(torch.optim, name)(theirs.parameters(), lr=0.01).step)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def resume(folder):
    """A saved training goes on to the same bits, with a schedule and 8-bit states."""

    def made():
        net = network()
        schedule = tristep.lr_scheduler.CosineScheduler(20, base_lr=0.01)
        options = {"learning_rate": 0.01, "lr_scheduler": schedule, "state_dtype": "8bit", "clip_gradient": 1.0}
        return net, tristep.Trainer(net, "adam", options)

    path = folder / "trainer.safetensors"
    net, trainer = made()
    train(net, lambda: trainer.step(1))
    trainer.save_states(path)
    weights = [param.detach().clone() for param in net.parameters()]
    train(net, lambda: trainer.step(1))
    other, resumed = made()
    with torch.no_grad():
        for param, weight in zip(other.parameters(), weights, strict=True):
            param.copy_(weight)
    resumed.load_states(path)
    train(other, lambda: resumed.step(1))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


if __name__ == "__main__":
    print(", ".join(f"{name} {version(name)}" for name in NAMES))
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor"):
        compare(name)
    with tempfile.TemporaryDirectory() as folder:
        resume(Path(folder))
    subprocess.run([sys.executable, "-m", "tristep", "doctor"], check=True)
