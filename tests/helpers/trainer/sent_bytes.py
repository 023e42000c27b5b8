"""The bytes that a process sends over TCP, as Linux counts them, and those that docs/scaling.md says, for tests."""

import ast
import math
import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest

needs_counters = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs the counters of Linux")


def bytes_sent():
    """What this process has sent over all connections: `tcpi_bytes_sent` less `tcpi_bytes_retrans` of tcp_info."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if not os.path.lexists(f"/proc/self/fd/{name}") or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                sent, again = struct.unpack_from("QQ", own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)
                total += sent - again
    return total


class Row(NamedTuple):
    """A row of the table of bytes in docs/scaling.md; numbers are bytes for each parameter.

    Attributes:
        params: `compression_params`.
        formulas: what a rank sends with an all-reduce, and with ZeRO-1.
        on_four: the same on four ranks, as printed.
        worker: what a worker of a parameter server sends; None if that refuses the type.
    """

    params: dict[str, Any] | None
    formulas: tuple[str, str]
    on_four: tuple[float, float]
    worker: float | None

    def sent(self, ranks, zero1, **numbers):
        """The formula's value, with numbers for its other letters."""
        letters = {"N": ranks, "r": (ranks - 1) / ranks, "ceil": math.ceil, "log2": math.log2, **numbers}
        return eval(self.formulas[zero1], letters)


def rows_of_page():
    """The rows of the table in docs/scaling.md by the type of compression."""
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = page.partition("## What a step sends")[2].partition("\n## ")[0].splitlines()
    rows = {}
    for line in lines:
        if line.startswith(("| `None`", "| `{")):
            params, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
            params = ast.literal_eval(params)
            all_reduce, zero1 = cells[0], cells[2]
            worker = None if cells[4] == "refused" else float(cells[4])
            name = "uncompressed" if params is None else params["type"]
            rows[name] = Row(params, (all_reduce, zero1), (float(cells[1]), float(cells[3])), worker)
    return rows
