"""tristep in Ray Train's TorchTrainer with two workers, against one process with the whole batch."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import engine_training
import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # its own warnings; starting takes most of the time
CASES = {
    "AdamW": "torch AdamW",
    "multi": "multi",
    "dist_sync": "torch SGD",
    "dist_device_sync": "torch SGD",
    "all-reduce": "torch SGD",
}


@pytest.fixture(scope="module")
def ray():
    module = pytest.importorskip("ray", reason="needs ray")
    pytest.importorskip("ray.train.torch", reason="needs ray[train]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import what the tests import
        module.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield module
        module.shutdown()


def _fit(loop, config, folder, **run):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(**run)),
    ).fit()


@pytest.mark.sample(0)
def test_two_workers_are_one_process(ray, tmp_path):
    def loop(config):  # a function in a function, which Ray sends by value
        from ray import train
        from ray.train.torch import prepare_model

        context = train.get_context()
        rank, ranks = context.get_world_rank(), context.get_world_size()
        for case in config["cases"]:
            net = engine_training.make_net()
            if case in ("AdamW", "multi"):
                model, optimizer = prepare_model(net), engine_training.make_optimizer(case, net)
            else:
                store = {"kvstore": "dist_sync", "update_on_kvstore": False} if case == "all-reduce" else {"kvstore": case}
                model, optimizer = net, engine_training.make_trainer(net, **store)
            for step in range(engine_training.STEPS):
                optimizer.zero_grad()
                engine_training.loss_of(model, *engine_training.batch(step, rank, ranks)).backward()
                optimizer.step(*(() if model is not net else (ranks,)))
            np.save(f"{config['folder']}/{case}-{rank}.npy", engine_training.weights_of(net))
        assert ranks == 2

    _fit(loop, {"cases": list(CASES), "folder": str(tmp_path)}, tmp_path / "runs")
    for case, expected in CASES.items():
        first, second = (np.load(tmp_path / f"{case}-{rank}.npy") for rank in range(2))
        np.testing.assert_array_equal(first, second, err_msg=case)
        np.testing.assert_allclose(first, engine_training.one_process(expected), rtol=1e-4, atol=1e-5, err_msg=case)


@pytest.mark.sample(0)
def test_after_a_worker_was_killed_ray_goes_on_from_the_checkpoint(ray, tmp_path):
    def loop(config):
        from ray import train

        context, killed = train.get_context(), Path(config["folder"], "killed")
        rank, ranks, first = context.get_world_rank(), context.get_world_size(), 0
        net = engine_training.make_net()
        trainer = engine_training.make_trainer(net, kvstore="dist_sync")
        if (checkpoint := train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                net.load_state_dict(torch.load(f"{folder}/net.pt"))
                trainer.load_states(f"{folder}/trainer.safetensors")
            first = trainer.optimizer.num_update
        for step in range(first, engine_training.STEPS):
            if step == 3 and rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.zero_grad()
            engine_training.loss_of(net, *engine_training.batch(step, rank, ranks)).backward()
            trainer.step(ranks)
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_states(f"{folder}/trainer.safetensors")  # all ranks call it, one writes
                torch.save(net.state_dict(), f"{folder}/net.pt")
                train.report({"first": first}, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None)
        np.save(f"{config['folder']}/{rank}.npy", engine_training.weights_of(net))

    result = _fit(loop, {"folder": str(tmp_path)}, tmp_path / "runs", max_failures=1)
    assert (tmp_path / "killed").exists()
    assert result.metrics["first"] > 0  # mostly 3, or 2 where Ray had not noted the last report yet
    for rank in range(2):
        weights = np.load(tmp_path / f"{rank}.npy")
        np.testing.assert_allclose(weights, engine_training.one_process("torch SGD"), rtol=1e-4, atol=1e-5)
