"""What several processes do on GPUs, as in gpu_scenarios.py; their messages go through gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from gpu_scenarios import SET_UP, gpus, reasons

import tristep


def ranks() -> list[str]:
    """Two processes: sums of gradients, whole or compressed, and weights that are cut among the ranks."""
    found = []
    for given in (
        {},
        {"update_on_kvstore": True},
        *({"compression_params": {"type": kind}} for kind in ("2bit", "int8", "fp16", "topk")),
    ):
        found += _in_processes(_train_on_rank, given)
    return found


def owners() -> list[str]:
    """Two processes with shards of matrices, each of which is updated by one of them."""
    return _in_processes(_train_shards_on_rank)


def _train_shards_on_rank() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def cut(whole: torch.Tensor, dim: int) -> DTensor:
        """Shards on a GPU, for which there is no mesh here."""
        found = distribute_tensor(whole, mesh, [Shard(dim)])
        found._local_tensor = found._local_tensor.to("cuda:1")
        return found

    torch.manual_seed(0)
    alone = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 4), (3, 5), (1, 2))]
    with gpus() as simulated:
        with simulated.waits(SET_UP):
            params = [torch.nn.Parameter(cut(each.detach(), k % 2)) for k, each in enumerate(alone)]
        optimizers = [tristep.optim.Muon(each, lr=0.02) for each in (params, alone)]
        for k in range(5):
            with simulated.waits(SET_UP):
                for j, (param, other) in enumerate(zip(params, alone, strict=True)):
                    other.grad = torch.randn(other.shape)
                    param.grad = cut(other.grad, j % 2)
            with simulated.waits(SET_UP) if k < 2 else nullcontext():
                optimizers[0].step()
            optimizers[1].step()
        with simulated.waits(SET_UP):
            for param, other in zip(params, alone, strict=True):
                want = distribute_tensor(other.detach(), mesh, param.placements)
                torch.testing.assert_close(param._local_tensor.cpu(), want._local_tensor, rtol=0, atol=0)
    return reasons(simulated)


def _train_on_rank(given: dict[str, Any]) -> list[str]:
    why = "weights that are used by one rank alone, of which all ranks have to know"
    with gpus() as simulated:
        with simulated.waits(SET_UP):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).to("cuda:1")
            inputs = [torch.randn(4, 5).to("cuda:1") for _ in range(5)]
            trainer = tristep.Trainer(net, "adamw", {"learning_rate": 0.01}, kvstore="dist_sync", **given)
        for k, x in enumerate(inputs):
            with simulated.waits(SET_UP) if k < 3 else nullcontext():
                trainer.zero_grad()
                (net(x) * (1 + dist.get_rank())).square().mean().backward()
                trainer.step(4)
        if not given:
            with simulated.waits(why):
                trainer.zero_grad()
                net[1](torch.ones(2, 4, device="cuda:1")).mean().backward()
                trainer.step(4, ignore_stale_grad=True)
    return reasons(simulated)


def _in_processes(function: Callable[..., list[str]], *args: Any) -> list[str]:
    """What two processes with a group return, or raise."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, members = [], []
        for rank in range(2):
            receiver, sender = context.Pipe(duplex=False)
            member = context.Process(target=_rank, args=(rank, folder, sender, function, args))
            member.start()
            sender.close()
            pipes.append(receiver)
            members.append(member)
        answers = []
        for pipe, member in zip(pipes, members, strict=True):
            answers.append(pipe.recv() if pipe.poll(120) else "no answer")
            member.kill() if answers[-1] == "no answer" else member.join(10)
    for answer in answers:
        assert isinstance(answer, list), answer
    assert answers[0] == answers[1]
    return answers[0]


def _rank(rank: int, folder: str, pipe: Any, function: Callable[..., list[str]], args: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        pipe.send(function(*args))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # without what the process that was forked does at its end
