"""Roles: which processes are workers and which are servers, and their process group."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...trainer import dist_utils
from ...trainer.validation import number

_TIMEOUT = 1800.0  # seconds; torch's own default for gloo


@dataclass
class Roles:
    """The role of this process, and a process group of all workers and servers for one store."""

    rank: int
    workers: int
    servers: int
    group: Any
    made: Any  # the default process group, if it was made here
    timeout: float

    @classmethod
    def of_this_job(cls, timeout: float | None) -> Roles:
        """Make a process group with the other processes, and return this process's role.

        Raises:
            ValueError: there are fewer processes than servers plus one, or TRISTEP_NUM_SERVERS is not an integer >= 1.
            RuntimeError: the environment does not describe several processes.
        """
        timeout = number("timeout", _TIMEOUT if timeout is None else timeout, above=0)
        servers = integer_variable("TRISTEP_NUM_SERVERS", 1)
        initialized = dist.is_available() and dist.is_initialized()
        if not initialized and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise RuntimeError(
                "a parameter server needs several processes, and the environment names none: start the program with "
                f"torchrun --nproc_per_node {servers + 1} (or more), or call torch.distributed.init_process_group() first"
            )
        count = dist.get_world_size() if initialized else int(os.environ["WORLD_SIZE"])
        if count <= servers:
            raise ValueError(
                f"{count} processes are too few for TRISTEP_NUM_SERVERS={servers} servers and a worker: start at least "
                f"{servers + 1}, as with torchrun --nproc_per_node {servers + 1}"
            )
        limit = timedelta(seconds=timeout)
        if not initialized:
            dist.init_process_group("gloo", timeout=limit)
        group = dist.new_group(backend="gloo", timeout=limit)
        dist_utils.barrier(group)  # a process that leaves early would break connections that others are making
        return cls(dist.get_rank(), count - servers, servers, group, None if initialized else dist.group.WORLD, timeout)

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


def integer_variable(variable: str, default: int) -> int:
    """Return the integer in an environment variable, or the default if it is not set.

    Raises:
        ValueError: the variable is not an integer >= 1.
    """
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r}: must be an integer >= 1")
    return int(text)
