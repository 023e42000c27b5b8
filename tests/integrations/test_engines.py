"""Optimizers and Trainers in other packages' engines with two processes, against one process with the whole batch."""

import importlib.util
import socket

import engine_training
import numpy as np
import pytest

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
NAMES = ["AdamW", "multi"]


def _needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def _expected(name):
    return engine_training.one_process({"AdamW": "torch AdamW", "trainer": "torch SGD"}.get(name, name))


def _same_and_close(weights, name):
    first, second = weights
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, _expected(name), **CLOSE)


@_needs("accelerate")
@_needs("matplotlib")
@pytest.mark.sample(0)
@pytest.mark.parametrize("name", NAMES)
def test_accelerate(processes, name):
    answers = processes(2).run(engine_training.accelerated, name)
    _same_and_close([weights for _, weights, _ in answers], name)
    for ranks, _, steps in answers:
        assert ranks == 2
        assert steps == list(range(1, engine_training.STEPS + 1))


@_needs("lightning")
@_needs("matplotlib")
@pytest.mark.sample(0)
@pytest.mark.parametrize("name", NAMES)
def test_lightning(processes, name, tmp_path):
    answers = processes(2).run(engine_training.fitted_by_lightning, name, str(tmp_path))
    _same_and_close([weights for _, weights, _ in answers], name)
    for ranks, _, steps in answers:
        assert ranks == 2
        assert steps == list(range(1, engine_training.STEPS + 1))


@_needs("deepspeed")
@pytest.mark.sample(0)
@pytest.mark.parametrize(("name", "stage"), [("AdamW", 0), ("AdamW", 1), ("multi", 0), ("two", 1)])
def test_deepspeed(processes, name, stage, tmp_path):
    answers = processes(2).run(engine_training.by_deepspeed, name, stage, str(tmp_path))
    _same_and_close([whole for whole, _ in answers], name)
    for whole, resumed in answers:
        np.testing.assert_array_equal(resumed, whole)


@_needs("deepspeed")
@pytest.mark.sample(0)
def test_deepspeed_refuses_muon_where_it_joins_matrices(processes, tmp_path):
    with pytest.raises(RuntimeError, match=r"3 parameters, .* vector of .* Muon .*Use ZeRO stage 0"):
        processes(2).run(engine_training.by_deepspeed, "multi", 1, str(tmp_path))


@pytest.fixture
def lighthouse():
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft")
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    yield server.address().replace(socket.gethostname(), "127.0.0.1")
    server.shutdown()


@pytest.mark.sample(0)
@pytest.mark.parametrize("restarts", [False, True], ids=["", "a replica starts anew"])
@pytest.mark.parametrize("name", [*NAMES, "trainer"])
def test_torchft(processes, lighthouse, name, restarts):
    _same_and_close(processes(2).run(engine_training.by_torchft, name, lighthouse, restarts), name)
