"""Defects planted into kernels and launches, which the emulator must notice."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from tristep.kernels import MetricsBuffer, Update
from tristep.kernels.backends.triton import launch
from tristep.kernels.launch import GRADIENT
from tristep.kernels.metrics import update_square
from tristep.kernels.rules import adamw

from .cases import ProductCase, RuleCase, largest_difference
from .driver import install
from .stream import late

__all__ = ["EXPECTED", "find_all", "find_late"]

_SIZES = 2048, 1500
_FAR = 1 << 31  # elements
EXPECTED = {  # what a message must say
    "a store without its mask": "store out of bounds",
    "an offset of 32 bits": "out of bounds",
    "a wrong alignment": "misaligned",
    "no barriers": "since the last bar.sync",
    "swapped rows of pointers": "differs in",
    "a tile done twice": "race of CTAs",
    "copies not waited for": "wgmma of what cp.async has not been waited for",
    "products not waited for": "is used before wgmma.wait_group",
    "copies over what is read": "cp.async to what wgmma reads",
    "no fence of shared memory": "no fence.proxy.async since",
}


def find_all() -> dict[str, list[str]]:
    """What is found wrong, by defect; and by "nothing" what is without any."""
    plain, lamb, sgd = RuleCase("adamw"), RuleCase("lamb"), RuleCase("sgd")
    nothing = *_found(plain), *_found(lamb), *_found(sgd, before=_move_beyond_32_bits), *_found_in_products()
    return {
        "nothing": list(nothing),
        "a store without its mask": _found(sgd, _without_masks),
        "an offset of 32 bits": _found(sgd, _in_32_bits, _move_beyond_32_bits),
        "a wrong alignment": _found(RuleCase("sgd", offset=1), kernel_constants=_constants_if_aligned),
        "no barriers": _found(lamb, _without_barriers),
        "swapped rows of pointers": _found(plain, before=_swap_states),
        "a tile done twice": _found(plain, before=_repeat_tile),
        "copies not waited for": _found_in_products(r"cp\.async\.wait_group \d;"),
        "products not waited for": _found_in_products(r"wgmma\.wait_group\.sync\.aligned 0;"),
        "copies over what is read": _found_in_products(r"wgmma\.wait_group\.sync\.aligned 1;"),
        "no fence of shared memory": _found_in_products(r"fence\.proxy[^;]*;"),
    }


def _found(
    case: RuleCase,
    edit: Callable[[str], str] | None = None,
    before: Callable[[Update], None] | None = None,
    **patches: Any,
) -> list[str]:
    """What is found wrong with two tensors, after an edit of the PTX, of the update before each step, or of the launcher."""
    emulator = install()
    emulator.defects.clear()
    emulator.edit = edit
    try:
        with mock.patch.dict(vars(launch), patches):
            got = case.run("triton", _SIZES, before)
    finally:
        emulator.edit = None
    difference, where = largest_difference(case.run("cpu", _SIZES), got)
    return [*emulator.defects, *([f"differs in {where}"] if difference > case.limit else [])]


def _found_in_products(without: str | None = None) -> list[str]:
    """What is found wrong with a product of matrices, after the instructions that fit a pattern have been taken out."""
    emulator = install()
    emulator.defects.clear()
    if without is not None:
        pattern = re.compile(without.replace(" ", r"\s+"))
        emulator.edit = partial(pattern.sub, "")
    try:
        share, where = ProductCase((128, 448)).compare()
    finally:
        emulator.edit = None
    return [*emulator.defects, *([f"differs in {where}"] if share > ProductCase.limit else [])]


def _without_masks(ptx: str) -> str:
    return re.sub(r"@%p\d+ (st\.global)", r"\1", ptx)


def _in_32_bits(ptx: str) -> str:
    """The first element of a tile, its number times its size, as a product of 32 bits is."""
    product = r"(mul\.lo\.s64\s+(%rd\d+), %rd\d+, %rd\d+;)"
    return re.sub(product, r"\1 shl.b64 \2, \2, 32; shr.s64 \2, \2, 32;", ptx)


def _without_barriers(ptx: str) -> str:
    return re.sub(r"bar\.sync[^;]*;", "", ptx)


_kernel_constants = launch.kernel_constants


def _constants_if_aligned(*given: Any) -> Any:
    *others, _, zero_grads, walk = given
    return _kernel_constants(*others, True, zero_grads, walk)


def _swap_states(update: Update) -> None:
    for launched in update.groups:
        launched._addresses[[2, 3]] = launched._addresses[[3, 2]]


def _repeat_tile(update: Update) -> None:
    for launched in update.groups:
        launched._tiles[1] = launched._tiles[0]


def _move_beyond_32_bits(update: Update) -> None:
    """Make the tensors the last elements of larger ones, which need no memory as long as nobody touches the rest."""
    for launched in update.groups:
        if int(launched._sizes.min()) > _FAR:
            continue
        launched._addresses -= 4 * _FAR
        launched._sizes += _FAR
        launched._tiles[:, 1] += _FAR // launched.tile
        launched._upload = partial(_upload_far, launched, launched._upload)


def _upload_far(launched: Any, upload: Any) -> None:
    upload()
    upload.gradients.copy_(torch.from_numpy(launched.addresses[GRADIENT] - 4 * _FAR))


def find_late() -> list[str]:
    """What is found wrong with steps that are queued."""
    emulator = install()
    emulator.defects.clear()
    weights, metrics = _many_steps("cpu")
    with late(emulator) as stream:
        late_weights, late_metrics = _many_steps("triton")
        assert stream.queued > 40
    wrong = [] if all(map(torch.equal, weights, late_weights)) else ["weights"]
    wrong += [f"metrics of step {k}" for k in metrics if not np.allclose(metrics[k], late_metrics[k], rtol=1e-5)]
    return [*emulator.defects, *wrong]


def _many_steps(engine: str) -> tuple[list[torch.Tensor], dict[int, np.ndarray]]:
    """20 steps with other hyper-parameters and gradients each: the weights, and by step the metrics, read along the way."""
    torch.manual_seed(0)
    sizes = 5, 1030, 2048
    weights = [torch.ones(n) for n in sizes]
    states = [tuple(torch.zeros(n) for _ in adamw.state) for n in sizes]
    gradients = [[torch.randn(n) for n in sizes] for _ in range(3)]
    update, into = Update(adamw, weights, states, engine=engine), MetricsBuffer(update_square, len(sizes), 64)
    found: dict[int, np.ndarray] = {}
    for step in range(20):
        update.hyper[:] = 0.5
        update.hyper[:, 1] = 0.1 / (step + 1)
        update.bind(gradients[step % len(gradients)])
        into.begin_step()
        update(into)
        into.end_step()
        if step % 5 == 4:
            steps = into.arrived(wait=step == 19)
            new = range(max(steps.start, len(found)), steps.stop)
            found.update(zip(new, into.values(new)[:, :, 0], strict=True))
    return weights, found
