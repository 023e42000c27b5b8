"""Whether this process is a fork: it then has none of its parent's threads."""

from __future__ import annotations

import os

_forked: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


def is_forked() -> bool:
    """Whether this process was forked from one that had imported this: it has none of the threads of that one."""
    return bool(_forked)
