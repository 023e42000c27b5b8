"""Threads of the CPU engine and of Python, forked processes, and stacks of tensors: the serial result to the bit."""

import importlib
import math
import threading

import pytest
import torch

from tristep.kernels import Update, rules, update
from tristep.kernels.states import stacked_zeros

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


def _stack_of(shape, place, aligned):
    """A stack of random numbers [5, *shape], whose rows begin at multiples of 16 bytes or not."""
    size = math.prod(shape)
    room = torch.randn(5, -(-size // 4) * 4 if aligned else size, generator=torch.Generator().manual_seed(size))
    return room.to(place.device)[:, :size].unflatten(1, shape)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("turned", [False, True], ids=["straight", "turned"])
def test_stacks_are_updated_as_what_is_in_them(compiled_place, aligned, turned):
    """Each with hyper-parameters of its own; gradients in another order of dimensions, and one that is missing."""
    place = compiled_place
    stacks = [_stack_of(shape, place, aligned=aligned) for shape in ((3, 2), (7,), (4, 4))]
    gradients = [_stack_of(shape[::-1], place, aligned=not aligned) for shape in ((3, 2), (7,), (4, 4))]
    gradients = [each.mT if each.dim() > 2 and turned else each.reshape(stacks[k].shape) for k, each in enumerate(gradients)]
    states = [(stacked_zeros(5, each[0]), stacked_zeros(5, each[0])) for each in stacks]
    others = [[each.clone() for each in stack] for stack in stacks]
    their_states = [[(torch.zeros_like(each), torch.zeros_like(each)) for each in stack] for stack in others]
    run = Update(rules.adam, stacks, states, engine=place.engine, stacked=True)
    flat = [each for stack in others for each in stack]
    single = Update(rules.adam, flat, [row for rows in their_states for row in rows], engine=place.engine)
    for each in (run, single):
        each.hyper[:] = [[1.0, 0.01 * (i + 1), 0.1, INF, 0.9, 0.1, 0.99, 0.01, 1e-8] for i in range(15)]
    for missing in (None, 1, None):
        given = [None if k == missing else each for k, each in enumerate(gradients)]
        run.bind(given)
        run()
        rows = [None if stack is None else stack[i] for stack in given for i in range(5)]
        single.bind(rows)
        single()
    assert all(torch.equal(each, torch.stack(row)) for each, row in zip(stacks, others, strict=True))
    for row, their_rows in zip(states, their_states, strict=True):
        assert all(map(torch.equal, row, map(torch.stack, zip(*their_rows, strict=True))))
    assert run.launches == 2  # those of which each begins at a multiple of 16 bytes, and the others


def test_stacks_that_cannot_be_taken():
    with pytest.raises(ValueError, match="have gaps"):
        Update(rules.sgd, [torch.ones(2, 3, 4)[:, :, ::2]], [()], stacked=True)
    with pytest.raises(ValueError, match="share memory"):
        Update(rules.sgd, [torch.ones(3).expand(2, 3)], [()], stacked=True)
    with pytest.raises(ValueError, match="a stack of 2, with states or masters of 3"):
        Update(rules.sgd_momentum, [torch.ones(2, 3)], [(torch.zeros(3, 3),)], stacked=True)
    with pytest.raises(ValueError, match=r"\(4,\) on cpu: must be .* \(3,\)"):
        Update(rules.sgd_momentum, [torch.ones(2, 3)], [(torch.zeros(2, 4),)], stacked=True)
    with pytest.raises(ValueError, match="eager engine.*use unbind"):
        Update(rules.sgd, [torch.ones(2, 3)], [()], engine="eager", stacked=True)
    with pytest.raises(TypeError, match="must be stacks"):
        Update(rules.sgd, [torch.ones(())], [()], stacked=True)


def test_little_work_is_not_given_to_threads(launch, monkeypatch):
    monkeypatch.setattr(launch, "run_threads", lambda *args: pytest.fail("threads for little work"))
    _large_step((launch.PARALLEL_FROM // 2, launch.PARALLEL_FROM // 2 - 1))


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
