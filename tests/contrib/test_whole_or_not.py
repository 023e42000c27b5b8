"""What changes several tensors is whole or not at all, wherever Ctrl-C comes."""

import copy
import signal
from pathlib import Path

import pytest
import torch
from interrupting import at_each_line

import tristep
from tristep.contrib import dion, mxnet_files, qk_clip, sam
from tristep.trainer.optim import joined
from tristep.trainer.utils import interrupts

FILES = Path(__file__).parents[1] / "golden" / "files"


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _sam():
    net = torch.nn.Linear(2, 2)
    optimizer = tristep.optim.SAM(net.parameters(), "SGD", rho=0.5, lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    return net, optimizer, lambda: optimizer.step(closure)


def _sams_groups():
    net, optimizer, step = _sam()
    step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"rho": 0.25, "lr": 0.125}
    del saved["param_groups"][0]["adaptive"]  # as the base's own groups, which know no option of SAM
    return net, optimizer, lambda: optimizer.load_state_dict(saved)


def _several():
    net = torch.nn.Linear(2, 2)
    optimizer = tristep.optim.MultiOptimizer(net, [("*weight", "lion"), ("*", "adam")], lr=0.5)
    net(torch.ones(1, 2)).sum().backward()
    return net, optimizer, optimizer.step


def _dion():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = tristep.optim.Dion2(net.parameters(), lr=0.5)
    net(torch.ones(1, 2)).sum().backward()
    return net, optimizer, optimizer.step


def _clip():
    net, x = torch.nn.MultiheadAttention(4, 2), torch.ones(3, 1, 4)
    clip = qk_clip.QKClip(net, tau=1e-3)
    net(x, x, x)
    return net, None, clip.step


def _parameters():
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 4)
    net = torch.nn.Sequential(*layers)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight", "4.bias"]
    return net, None, lambda: tristep.load_mxnet_params(FILES / "model.params", net, names)


CASES = {
    "SAM": (_sam, sam),
    "SAM's groups": (_sams_groups, sam),
    "several": (_several, joined),
    "Dion2": (_dion, dion.rules),
    "QKClip": (_clip, qk_clip.clip),
    "MXNet's parameters": (_parameters, mxnet_files.params),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_it_is_whole_or_not_at_all(case):
    make, module = CASES[case]

    def made_anew():
        torch.manual_seed(0)
        return make()

    def run():
        call()

    def look():
        return str([net.state_dict(), None if optimizer is None else optimizer.state_dict()])

    net, optimizer, call = made_anew()
    before = look()
    run()
    whole, lines = look(), 0
    assert whole != before
    net, optimizer, call = made_anew()
    for line in at_each_line(run, module.__file__, interrupts.__file__):
        assert look() in (before, whole), f"half done after an interrupt at {line}"
        net, optimizer, call = made_anew()
        lines += 1
    assert lines > 10
