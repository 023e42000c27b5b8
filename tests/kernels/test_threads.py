"""Threads of the CPU engine and of Python, forked processes, and stacks of tensors: the serial result to the bit."""

import importlib
import math
import threading

import pytest
import torch

from tristep.kernels import Update, rules, update

INF = math.inf


@pytest.fixture
def launch(monkeypatch):
    """The module that launches the CPU backend's loops, on four threads."""
    module = pytest.importorskip("tristep.kernels.backends.cpu.launch", reason="needs numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)  # whatever the machine has
    return module


def _large_step(sizes=(300_000, 1, 5, 70_000, 0, 200_001)):
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(size, generator=generator) for size in sizes]
    gradients = [torch.randn(size, generator=generator) for size in sizes]
    states = [(torch.rand(size, generator=generator), torch.rand(size, generator=generator)) for size in sizes]
    values = {"lr": 0.1, "wd": 0.01, "clip": 1.0, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
    update(rules.adam, weights, gradients, states, values, engine="cpu")
    return [*weights, *(tensor for row in states for tensor in row)]


@pytest.mark.parametrize("library", ["openmp", "thread pool"])
def test_threads_give_the_serial_result_bit_for_bit(launch, monkeypatch, library):
    with monkeypatch.context() as patch:
        patch.setattr(launch, "PARALLEL_FROM", 10**9)
        serial = _large_step()
    threads = importlib.import_module("tristep.kernels.backends.cpu.threads")
    if library == "thread pool":
        monkeypatch.setattr(threads, "openmp", lambda: None)
    elif threads.openmp() is None:
        pytest.skip("this torch comes without GOMP_parallel")
    used = []
    run_threads = launch.run_threads
    monkeypatch.setattr(launch, "run_threads", lambda *args: (used.append(args[2]), run_threads(*args)))
    for _ in range(3):
        assert all(map(torch.equal, _large_step(), serial))
    assert used == [4, 4, 4]


def test_two_threads_of_python_step_different_tables_at_once(place, write_rules):
    """Also the first step, where both need the rule compiled."""
    if (place.engine, place.device) == ("triton", "cpu"):
        pytest.skip("Triton's interpreter exchanges functions of its modules while it runs: one thread at a time")
    text = "@rule\ndef descend(w, g, state, hyper):\n    (lr,) = hyper\n    return w - lr * g, state\n"
    rule = write_rules(text, f"descend_{place.engine}").descend
    sizes = (7, 250_000)  # the larger with threads of its own
    weights = [torch.zeros(size, device=place.device) for size in sizes]
    gradients = [torch.ones(size, device=place.device) for size in sizes]
    barrier, errors = threading.Barrier(2), []

    def work(weight, gradient):
        try:
            barrier.wait(timeout=60)
            run = Update(rule, [weight], [()], engine=place.engine)
            run.hyper[:] = [1.0, 1.0]
            run.bind([gradient])
            for _ in range(100):
                run()
            if place.device == "cuda":
                torch.cuda.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(weights, gradients, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(bool((weight == -100).all()) for weight in weights)


FORK = """
import math, multiprocessing, os
import torch
from tristep.kernels import Update, rules

torch.set_num_threads(2)
weight, gradient = torch.zeros(300_000), torch.ones(300_000)
run = Update(rules.sgd, [weight], [()], engine="cpu")
run.hyper[:] = [1.0, 1.0, 0.0, math.inf]
run.bind([gradient])
run()  # from here on, there are threads that a child will not have

def step():
    run()
    assert (weight.numpy() == -2).all()  # torch's own threads would hang in the child

child = multiprocessing.get_context("fork").Process(target=step)
child.start()
child.join(60)
if child.exitcode is None:
    child.kill()
print("child:", child.exitcode)
run()
assert (weight == -2).all()
"""


@pytest.mark.sample(0)
def test_a_forked_child_can_step(launch, fresh_python, tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(FORK, encoding="utf-8")
    assert "child: 0" in fresh_python("-W", "ignore", script)
