"""What the product does on GPUs, done on simulated ones while another GPU is the current one; see simulated_gpus.py.

Each scenario raises if anything is done on another device or makes the host wait, where it does not say that it may, and if
its numbers are not those of the same on the CPU. Kernels are run by the emulator in gpu_emulator. A scenario returns why it
has waited after its set-up.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_emulator.driver import install
from simulated_gpus import SimulatedGpus

import tristep
from tristep import amp
from tristep.kernels import host_memory
from tristep.kernels.norms import global_norm
from tristep.optim import clip_grad_norm_
from tristep.trainer import Ensemble
from tristep.viz import Recorder

Make = Callable[[list[torch.nn.Parameter]], Callable[[], Any]]  # of parameters a function that takes a step
SET_UP = "the first steps make tables and compile kernels"
IN_16_BITS = ("muon", "normuon", "dion2", "nordion2")  # which are others on a CPU
SIZES = ((3, 5), (1025,), (), (0,), (70, 30))


@contextmanager
def gpus(*used: int) -> Iterator[SimulatedGpus]:
    """Simulated GPUs that the emulator runs kernels on."""
    emulator = install()
    emulator.defects.clear()
    with SimulatedGpus(used or (1,)) as found, mock.patch.object(emulator, "gpus", found):
        yield found
    assert not emulator.defects, "\n".join(emulator.defects)


class Training:
    """Parameters on a device, and steps with new gradients.

    Args:
        device: where.
        make: gives the function that takes a step.
        sizes: of the parameters.
    """

    def __init__(self, device: str, make: Make, sizes: Sequence[tuple[int, ...]]) -> None:
        torch.manual_seed(0)
        self.device = device
        self.params = [torch.nn.Parameter((torch.randn(size) + 2).to(device)) for size in sizes]
        self.step = make(self.params)

    def prepare(self, k: int) -> None:
        """Gradients of step k, in the same memory in the first steps."""
        torch.manual_seed(k + 1)
        for param in self.params:
            gradient = torch.randn(param.shape).to(self.device)
            if param.grad is None or k > 3:
                param.grad = gradient
            else:
                param.grad.copy_(gradient)


def train(make: Make, sizes: Sequence[tuple[int, ...]] = SIZES, atol: float = 1e-5) -> list[str]:
    """Six steps, which must lead where they do on the CPU; from the third one on the host may not wait."""
    with gpus() as simulated:
        with simulated.waits(SET_UP):
            training = Training("cuda:1", make, sizes)
            for k in range(2):
                training.prepare(k)
                training.step()
        for k in range(2, 6):
            with simulated.waits(SET_UP):
                training.prepare(k)
            training.step()
        with simulated.waits(SET_UP):
            found = [param.detach().cpu() for param in training.params]
    expected = Training("cpu", make, sizes)
    for k in range(6):
        expected.prepare(k)
        expected.step()
    for ours, theirs in zip(found, expected.params, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=atol)
    return reasons(simulated)


def reasons(simulated: SimulatedGpus) -> list[str]:
    """Why the host has waited after the set-up."""
    return [why for why in simulated.waits_for if why != SET_UP]


def optimizer(name: str, options: dict[str, Any]) -> list[str]:
    """Steps of the Trainer, each with another learning rate."""

    def make(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        trainer, rates = tristep.Trainer(params, name, options), itertools.count(1)

        def step() -> None:
            trainer.set_learning_rate(0.01 / next(rates))
            trainer.step(2)

        return step

    atol = 1e-3 if name in IN_16_BITS else 1e-5
    return train(make, [size for size in SIZES if len(size) == 2] if name == "groupadagrad" else SIZES, atol)


def options() -> list[str]:
    """Everything that a step folds in, and what reads it: telemetry, and averages of weights."""
    found = []
    every: dict[str, Any] = {"learning_rate": 0.01, "clip_norm": 1.0, "ema_decay": 0.9, "skip_nonfinite": True}
    found += optimizer("adamw", every)

    def with_telemetry(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        trainer = tristep.Trainer(params, "adamw", {"learning_rate": 0.01}, telemetry=True)

        def step() -> None:
            trainer.step(2)
            trainer.telemetry.read()  # what has arrived

        return step

    found += train(with_telemetry)
    return found


def low_precision() -> list[str]:
    """States of 8 bits, rounded at random, and masters: the numbers are compared elsewhere."""
    for dtype, given in (
        (torch.float32, {"state_dtype": "8bit", "stochastic_rounding": True}),
        (torch.bfloat16, {"state_dtype": "bfloat16", "stochastic_rounding": True}),
        (torch.bfloat16, {"multi_precision": "remainder", "state_dtype": "8bit"}),
    ):
        with gpus() as simulated:
            with simulated.waits(SET_UP):
                params = [torch.nn.Parameter(torch.ones(size).to("cuda:1", dtype)) for size in SIZES]
                trainer = tristep.Trainer(params, "adamw", {"learning_rate": 0.01, **given})
            for k in range(4):
                for param in params:
                    param.grad = torch.ones_like(param)
                with simulated.waits(SET_UP) if k < 2 else nullcontext():
                    trainer.step(1)
    return []


def host_states() -> list[str]:
    """States in memory of the host: numbers are those of states on the GPU, after loading, too; at last all is released."""
    for make, shape in (
        (lambda params, where: tristep.Trainer(params, "adamw", where), (70, 30)),
        (lambda params, where: tristep.Trainer(params, "adamw", {"state_dtype": "8bit", **where}), (70, 90)),
        (lambda params, where: tristep.Trainer(params, "muon", where), (70, 30)),
        (lambda params, where: tristep.Trainer(params, "came", where), (70, 30)),
        (lambda params, where: tristep.optim.AdamW(params, **where), (70, 30)),
        (lambda params, where: tristep.optim.Lion(params, **where), (70, 30)),
    ):
        found = [_with_states(make, shape, where) for where in ({}, {"state_device": "cpu"})]
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return []


def _with_states(make: Any, shape: tuple[int, ...], where: dict[str, str]) -> list[torch.Tensor]:
    """Return weights after three steps, and after another one with loaded states."""
    with gpus() as simulated, simulated.waits(SET_UP), tempfile.TemporaryDirectory() as folder:
        found, states = [], Path(folder, "states")
        for loads in (False, True):
            training = Training("cuda:1", lambda params: make(params, where), (shape, (5,)))
            stepped: Any = training.step
            of_torch = isinstance(stepped, torch.optim.Optimizer)
            if loads:
                for param, value in zip(training.params, found, strict=True):
                    param.data.copy_(value)
                stepped.load_state_dict(torch.load(states)) if of_torch else stepped.load_states(states)
            for k in range(3):
                training.prepare(k)
                stepped.step() if of_torch else stepped.step(1)
            assert sum(simulated.registered.values()) >= bool(where)
            if of_torch:
                assert _are_on_host(stepped) == {bool(where)}
            torch.save(stepped.state_dict(), states) if of_torch else stepped.save_states(states)
            found += [param.detach().cpu() for param in training.params]
            del training, stepped
            gc.collect()
            assert not simulated.registered
    return found


def _are_on_host(stepped: torch.optim.Optimizer) -> set[bool]:
    """Whether states of the shape of their parameter are in memory of the host."""
    rows = [(param, row.values()) for param, row in stepped.state.items()]
    return {host_memory.is_on_host(each) for param, row in rows for each in row if each.shape == param.shape}


def loss_scale() -> list[str]:
    """A loss scaler, gradients that are unscaled in place, and torch's GradScaler."""
    amp.init()

    def ours(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        trainer, steps = tristep.Trainer(params, "adamw", {"learning_rate": 0.01, "clip_norm": 1.0}), itertools.count()
        amp.init_trainer(trainer, amp.LossScaler(4.0, scale_window=2))

        def step() -> None:
            with amp.scale_loss(torch.ones((), device=params[0].device), trainer):
                pass
            if next(steps) % 2:
                amp.unscale(trainer)
            trainer.step(1)

        return step

    def theirs(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        stepped = tristep.optim.AdamW(params, lr=0.01)

        def step() -> None:  # what GradScaler.step does on a GPU
            stepped.grad_scale = torch.full((), 4.0, device=params[0].device)
            stepped.found_inf = torch.zeros((), device=params[0].device)
            stepped.step()

        return step

    return train(ours) + train(theirs)


def norms() -> list[str]:
    """The gradients' norm, and clipping by it, where gradients are at other addresses each time."""

    def make(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        stepped = tristep.optim.SGD(params, lr=0.01)

        def step() -> None:
            norm = global_norm([param.grad for param in params])
            clip_grad_norm_(params, 1.0)
            torch._foreach_mul_([param.grad for param in params], norm)
            stepped.step()

        return step

    return train(make)


def ascent() -> list[str]:
    """Two backward passes a step, the second at weights uphill."""

    def make(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        stepped = tristep.optim.SAM(params, "SGD", rho=0.05, lr=0.01)

        def step() -> None:
            stepped.ascend()
            for param in params:
                param.grad.mul_(0.5)
            stepped.step()

        return step

    return train(make)


def capture() -> list[str]:
    """A step as a graph, which is made, recorded and replayed on the parameters' device."""
    found = []
    for device in ("cuda:1", "cpu"):
        torch.manual_seed(0)
        with gpus() if device == "cuda:1" else nullcontext() as simulated:
            with nullcontext() if simulated is None else simulated.waits(SET_UP):
                net = torch.nn.Linear(5, 3).to(device)
                inputs = [torch.randn(4, 5).to(device) for _ in range(8)]
                trainer = tristep.Trainer(net, "adamw", {"learning_rate": 0.01, "clip_norm": 0.1})

            def fn(x: torch.Tensor, net: Any = net, trainer: Any = trainer) -> torch.Tensor:
                loss = net(x).square().mean()
                trainer.zero_grad(set_to_none=False)
                loss.backward()
                trainer.step(1)
                return loss

            step = fn if simulated is None else trainer.capture(fn)
            for k, x in enumerate(inputs):
                trainer.set_learning_rate(0.01 / (k + 1))
                with simulated.waits(SET_UP) if simulated is not None and k < 5 else nullcontext():
                    step(x)
            if simulated is not None:
                assert {what for what, _ in simulated.graphs} == {"made", "recorded", "replayed"}
                with simulated.waits(SET_UP):
                    found += [param.detach().cpu() for param in net.parameters()]
    for ours, theirs in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    return []


def products() -> list[str]:
    """A symmetric product, with the tile that is taken where none is timed."""
    from tristep.kernels.backends.triton import symmetric

    with gpus() as simulated, mock.patch.object(symmetric, "_tiles_of", return_value=symmetric.TILES[-1:]):
        with simulated.waits(SET_UP):
            x = torch.randn(2, 80, 48).half().to("cuda:1")
        for _ in range(2):
            found = symmetric.symmetric_product(None, x, x.mT)
        with simulated.waits(SET_UP):
            torch.testing.assert_close(found.float(), x.float() @ x.mT.float(), rtol=1e-3, atol=1e-2)
    return []


def in_backward() -> list[str]:
    """Updates during the backward pass, of each layer when its gradients are there."""
    found = []
    for device in ("cuda:1", "cpu"):
        torch.manual_seed(0)
        with gpus() if device == "cuda:1" else nullcontext() as simulated:
            with nullcontext() if simulated is None else simulated.waits(SET_UP):
                net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).to(device)
                inputs = [torch.randn(4, 5).to(device) for _ in range(4)]
                trainer = tristep.Trainer(net, "adamw", {"learning_rate": 0.01})
            for k, x in enumerate(inputs):
                setting_up = simulated.waits(SET_UP) if simulated is not None and k < 2 else nullcontext()
                with setting_up, trainer.step_in_backward(4):
                    net(x).square().mean().backward()
            if simulated is not None:
                with simulated.waits(SET_UP):
                    found += [param.detach().cpu() for param in net.parameters()]
    for ours, theirs in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    return []


def sparse() -> list[str]:
    """Rows of an embedding."""
    rows, why = torch.tensor([[1, 4, 4, 7]]), "how many rows there are is found out by coalesce(), in each step"
    with gpus() as simulated:
        with simulated.waits(SET_UP):
            weight = torch.nn.Parameter(torch.ones(9, 3).to("cuda:1"))
            trainer = tristep.Trainer([weight], "adagrad", {"learning_rate": 0.01})
        for k in range(4):
            with simulated.waits(SET_UP):
                values = torch.full((4, 3), 1.0 + k).to("cuda:1")
                weight.grad = torch.sparse_coo_tensor(rows.to("cuda:1"), values, (9, 3))
            with simulated.waits(why):
                trainer.step(1)
        with simulated.waits(SET_UP):
            assert [i for i, row in enumerate(weight.tolist()) if row != [1.0] * 3] == [1, 4, 7]
    return reasons(simulated)


def recorders() -> list[str]:
    """What a Recorder measures, of the Trainer and of an optimizer of torch's interface, and what it is given as scalars."""
    for torch_like in (False, True):

        def make(params: list[torch.nn.Parameter], torch_like: bool = torch_like) -> Callable[[], None]:
            source = tristep.optim.AdamW(params, lr=0.01) if torch_like else tristep.Trainer(params, "adamw")
            recorder = Recorder(source)

            def step() -> None:
                source.step() if torch_like else source.step(1)
                recorder.step(loss=params[0].detach().mean())

            return step

        train(make)
    return []


def replicas() -> list[str]:
    """Two replicas, on GPUs neither of which is the current one, whose gradients meet in a store."""
    waited = []
    for store, given in (
        ("device", {}),
        ("device", {"compression_params": {"type": "2bit", "threshold": 0.5}}),
        ("local", {}),
    ):
        for update in (False, True):
            with gpus(1, 2) as simulated:
                with simulated.waits(SET_UP):
                    torch.manual_seed(0)
                    first = torch.nn.Linear(5, 3)
                    nets = [torch.nn.Linear(5, 3).to(f"cuda:{k}") for k in (1, 2)]
                    for net in nets:
                        net.load_state_dict({name: each.to(f"cuda:{1}") for name, each in first.state_dict().items()})
                    options = {"learning_rate": 0.01}
                    trainer = tristep.Trainer(nets, "adamw", options, kvstore=store, update_on_kvstore=update, **given)
                for k in range(4):
                    for net in nets:
                        for param in net.parameters():
                            param.grad = torch.full_like(param, 1.0 + k)
                    why = SET_UP if k < 2 else f"the store {store!r} adds up on the CPU" if store == "local" else None
                    with nullcontext() if why is None else simulated.waits(why):
                        trainer.step(2)
                with simulated.waits(SET_UP):
                    for one, other in zip(*(net.parameters() for net in nets), strict=True):
                        torch.testing.assert_close(one.detach().cpu(), other.detach().cpu())
            waited += reasons(simulated)
    return waited


def ensemble() -> list[str]:
    """Several models that are stepped together."""

    def make(params: list[torch.nn.Parameter]) -> Callable[[], None]:
        together = Ensemble([tristep.optimizer.AdamW(rate) for rate in (0.01, 0.02, 0.03)], [params[0].data])
        return lambda: together.step([params[0].grad])

    return train(make)
