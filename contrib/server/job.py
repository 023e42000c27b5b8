"""Roles: which processes are workers and which is the server, and their process group."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...trainer.utils import distributed
from ...trainer.validation import number

_TIMEOUT = 1800.0  # seconds; torch's own default for gloo


@dataclass
class Roles:
    """The role of this process, and a process group of all workers and the server for one store."""

    rank: int
    workers: int
    group: Any
    made: Any  # the default process group, if it was made here
    timeout: float

    @property
    def server(self) -> int:
        """The rank of the server, the last one."""
        return self.workers

    @classmethod
    def of_this_job(cls, timeout: float | None) -> Roles:
        """Make a process group with the other processes, and return this process's role.

        Raises:
            ValueError: there is one process, or the environment asks for several servers.
            RuntimeError: the environment does not describe several processes.
        """
        timeout = number("timeout", _TIMEOUT if timeout is None else timeout, above=0)
        for variable in ("DMLC_NUM_SERVER", "TRISTEP_NUM_SERVERS"):
            if (servers := os.environ.get(variable, "1")) != "1":
                raise ValueError(
                    f"{variable}={servers!r}: one server is supported, the last process; set it to 1, or unset it"
                )
        initialized = dist.is_available() and dist.is_initialized()
        if not initialized and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise RuntimeError(
                "a parameter server needs several processes, and the environment names none: start the program with "
                "torchrun --nproc_per_node 2 (or more), or call torch.distributed.init_process_group() first"
            )
        count = dist.get_world_size() if initialized else int(os.environ["WORLD_SIZE"])
        if count < 2:
            raise ValueError(
                "one process is too few for a server and a worker: start two or more, as with torchrun --nproc_per_node 2"
            )
        limit = timedelta(seconds=timeout)
        if not initialized:
            dist.init_process_group("gloo", timeout=limit)
        group = dist.new_group(backend="gloo", timeout=limit)
        distributed.barrier(group)  # a process that leaves early would break connections that others are making
        return cls(dist.get_rank(), count - 1, group, None if initialized else dist.group.WORLD, timeout)

    def leave(self) -> None:
        """Release the process groups that were made here.

        A reference to a group keeps its threads alive, which may raise an error when the program ends.
        """
        group, made = self.group, self.made
        self.group = self.made = None
        if not dist.is_initialized():  # the program has destroyed all groups
            return
        with contextlib.suppress(ValueError):  # the program has destroyed all groups, and made new ones
            dist.destroy_process_group(group)
        if made is not None and dist.group.WORLD is made:
            dist.destroy_process_group()
