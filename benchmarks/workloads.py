"""Workloads: shapes of the parameters that are updated together, under a name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "ELEMENTS",
    "MATRICES",
    "MUON",
    "RULES",
    "STACKS",
    "STEPS",
    "STORED",
    "TENSORS",
    "Workload",
    "gpt2",
    "llama_shard",
    "parameters",
    "resnet50",
    "shrink",
]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Workload:
    """Parameter shapes under a name."""

    name: str
    shapes: Shapes

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


def shrink() -> None:
    """Replace all workloads by a few small tensors under the same names."""
    for tables in (STEPS, TENSORS, ELEMENTS, TELEMETRY, MATRICES, STACKS):
        tables.update({device: tuple(map(_shrunk, sizes)) for device, sizes in tables.items()})
    for table in (CHANGED, STORED, RULES, MUON):
        table.update({name: _shrunk(workload) for name, workload in table.items()})
    BUCKET.update(dict.fromkeys(BUCKET, 8192))


def _shrunk(workload: Workload) -> Workload:
    return Workload(workload.name, tuple(tuple(min(n, 16) for n in shape) for shape in workload.shapes[:8]))


def parameters(workload: Workload, device: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Random parameters with random gradients, which stay the same tensors from step to step."""
    params = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in workload.shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def gpt2() -> Shapes:
    """GPT-2 with 124 million parameters in 148 tensors (Radford et al. 2019; the head shares the embedding)."""
    width = 768
    attention = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return ((50257, width), (1024, width), *(attention + mlp) * 12, (width,), (width,))


def resnet50() -> Shapes:
    """ResNet-50 with 25.6 million parameters in 161 tensors (He et al. 2016, table 1)."""

    def convolution(outputs: int, inputs: int, size: int) -> Shapes:
        return ((outputs, inputs, size, size), (outputs,), (outputs,))  # and its normalization's weight and bias

    shapes = convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, inputs, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return (*shapes, (1000, inputs), (1000,))


def llama_shard(ranks: int = 8) -> Shapes:
    """What one of so many ranks holds of Llama 3 8B when each tensor is cut along its first dimension, 291 tensors."""
    width, hidden, keys, words, layers = 4096, 14336, 1024, 128256, 32
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    whole = [(words, width), *([*attention, *mlp, (width,), (width,)] * layers), (width,), (words, width)]
    return tuple((first // ranks, *rest) for first, *rest in whole)


_MLP = Workload("6 tensors of an MLP", ((64, 2), (32,), (32, 32), (32,), (32, 1), (1,)))
_TINY = Workload("148 x 8", ((8,),) * 148)
_SMALL = Workload("1,000 x 1,024", ((1024,),) * 1000)
_MANY = Workload("10,000 x 64", ((64,),) * 10_000)
_RESNET = Workload("ResNet-50, 161 tensors", resnet50())
_GPT2 = Workload("GPT-2 124M, 148 tensors", gpt2())

# Whole steps of AdamW.
STEPS = {
    "cpu": (
        _MLP,
        _TINY,
        _SMALL,
        _MANY,
        Workload("100 x 100,000", ((100_000,),) * 100),
        Workload("1 x 16.8 M", ((16_800_000,),)),
        _RESNET,
    ),
    "cuda": (
        _TINY,
        _SMALL,
        _MANY,
        _RESNET,
        _GPT2,
        Workload("Llama 3 8B / 8, 291 tensors", llama_shard()),
        Workload("1 x 1e9", ((1_000_000_000,),)),
    ),
}
# How a step grows: with the number of tensors of 1,024 elements each, and with the elements of one tensor.
TENSORS = {
    device: tuple(Workload(f"{n:,} x 1,024", ((1024,),) * n) for n in (10, 100, 1000, 10_000)) for device in ("cpu", "cuda")
}
ELEMENTS = {
    device: tuple(Workload(f"1 x 10^{power}", ((10**power,),)) for power in range(3, most + 1))
    for device, most in {"cpu": 7, "cuda": 9}.items()
}
# For telemetry.
TELEMETRY = {
    "cpu": (_TINY, Workload("1 x 16.8 M", ((16_800_000,),))),
    "cuda": (_TINY, Workload("1 x 16.8 M", ((16_800_000,),)), _GPT2),
}
# For steps that do something which the last one did not do.
CHANGED = {
    "first": Workload("3,000 x 8", ((8,),) * 3000),
    "by turns": Workload("148 x 64", ((64,),) * 148),
    "apart": Workload("200 x 64", ((64,),) * 200),
}
# For weights and states in low precision.
STORED = {"cpu": Workload("1 x 16.8 M", ((16_800_000,),)), "cuda": Workload("1 x 2^29", ((2**29,),))}
# Elements of a bucket of gradients that is compressed.
BUCKET = {"cpu": 2**24, "cuda": 2**28}
# For rules, a matrix, because some peers treat vectors otherwise; Muon gets smaller ones, because it multiplies them.
RULES = {"cpu": Workload("16,800 x 1,000", ((16_800, 1000),)), "cuda": Workload("2^14 x 2^14", ((2**14, 2**14),))}
MUON = {
    "cpu": Workload("2 x 1,024 x 1,024", ((1024, 1024),) * 2),
    "cuda": Workload("16 x 2,048 x 2,048", ((2048, 2048),) * 16),
}
MATRICES = {
    "cpu": (
        Workload("200 x 32 x 64", ((32, 64),) * 200),
        Workload("48 x 64 x 64", ((64, 64),) * 48),
        Workload("24 x 256 x 1,024", ((256, 1024),) * 24),
        Workload("8 x 1,024 x 1,024", ((1024, 1024),) * 8),
    )
}
MATRICES["cuda"] = (*MATRICES["cpu"], MUON["cuda"], Workload("8 x 1,024 x 4,096", ((1024, 4096),) * 8))
# Stacks of matrices whose products with themselves Muon needs.
STACKS = {
    "cpu": (),
    "cuda": (
        MUON["cuda"],
        Workload("8 x 1,024 x 4,096", ((1024, 4096),) * 8),
        Workload("24 x 512 x 2,048", ((512, 2048),) * 24),
        Workload("24 x 256 x 1,024", ((256, 1024),) * 24),
    ),
}
