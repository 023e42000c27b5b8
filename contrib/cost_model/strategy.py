"""Strategy: the estimated cost of one way to train on many GPUs, and tables of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_WITHOUT_STORE = "fully_shard(net) of torch and an optimizer of tristep.optim"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to train, with its estimated costs of a step for a rank, in bytes and seconds.

    Attributes:
        name: the name of the strategy.
        kvstore: all arguments of `Trainer` that choose it, as in a call; "" if tristep has no such store.
        wire: bytes that a rank sends; with nodes, bytes that leave its node.
        inner: bytes that a rank sends within its node, if there are nodes.
        weights, gradients, states, buffers, residuals: bytes of memory. `states` includes masters, `residuals` are the
            encoding errors of compression.
        communication: seconds of communication.
        codes: seconds of compressing and adding up.
        update: seconds of the optimizer's update.
        exposed: seconds of communication that the backward pass does not hide.
        step: seconds of exposed communication, codes, update, and forward and backward if given.
        verdict: whether compression pays, compared with the same updates without it; "" without compression.
        environment: the environment variables that it needs, as a shell sets them; "" for none.
    """

    name: str
    kvstore: str
    wire: float
    inner: float
    weights: float
    gradients: float
    states: float
    buffers: float
    residuals: float
    communication: float
    codes: float
    update: float
    exposed: float
    step: float
    verdict: str = ""
    environment: str = ""

    @property
    def memory(self) -> float:
        """The sum of a rank's bytes of memory."""
        return self.weights + self.gradients + self.states + self.buffers + self.residuals


def table(rows: Sequence[Strategy]) -> str:
    """Return strategies as a text table; below it are each one's arguments of `Trainer`, and the verdicts on compression."""
    nodes, overlap = any(row.inner for row in rows), any(row.exposed != row.communication for row in rows)
    columns: list[tuple[str, Any]] = [("strategy", lambda row: row.name), ("sent", lambda row: _format_bytes(row.wire))]
    if nodes:
        columns.append(("in node", lambda row: _format_bytes(row.inner)))
    columns += [
        ("weights", lambda row: _format_bytes(row.weights)),
        ("grads", lambda row: _format_bytes(row.gradients)),
        ("states", lambda row: _format_bytes(row.states)),
        ("buffers", lambda row: _format_bytes(row.buffers)),
        ("residuals", lambda row: _format_bytes(row.residuals)),
        ("memory", lambda row: _format_bytes(row.memory)),
        ("wire", lambda row: format_seconds(row.communication)),
    ]
    if overlap:
        columns.append(("exposed", lambda row: format_seconds(row.exposed)))
    columns += [(name, lambda row, name=name: format_seconds(getattr(row, name))) for name in ("codes", "update", "step")]
    cells = [[title for title, _ in columns]] + [[show(row) for _, show in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    arguments = [f"{row.environment} {row.kvstore or _WITHOUT_STORE}".strip() for row in rows]
    width = max(len(text) for text, row in zip(arguments, rows, strict=True) if row.verdict or row is rows[0])
    notes = [
        f"{row.name.ljust(widths[0])}  {text.ljust(width)}  {row.verdict}".rstrip()
        for row, text in zip(rows, arguments, strict=True)
    ]
    return "\n".join([*lines, "", *notes])


def format_seconds(value: float) -> str:
    """Return a duration with its unit, such as '3.86 ms'; '-' for 0."""
    if not value:
        return "-"
    return (
        f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} us"
    )


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count else "-"
        count /= 1000
    raise AssertionError
