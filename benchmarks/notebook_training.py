"""The training that notebook.py records: the demo's network, and a small GPT-2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tristep import Trainer
from tristep.demo import load, make_batches, network
from tristep.viz import Recorder


def demo_steps() -> tuple[Callable[[], torch.Tensor], Trainer]:
    """A function that takes a step of the demo's training, and the trainer."""
    torch.manual_seed(0)
    net, data = network(), load(torch.device("cpu"))
    trainer = Trainer(net, "adam", {"learning_rate": 1e-3})
    batches = itertools.cycle([(data["images"][each], data["labels"][each]) for each in make_batches(2)])

    def step() -> torch.Tensor:
        images, labels = next(batches)
        loss = cross_entropy(net(images), labels)
        trainer.zero_grad()
        loss.backward()
        trainer.step(1)
        return loss

    return step, trainer


def gpt2_steps(by: str = "Trainer") -> tuple[Callable[[], torch.Tensor], Any]:
    """A function that takes a step of a small GPT-2, and the trainer or torch's optimizer."""
    torch.manual_seed(0)
    net = SmallGPT2()
    tokens = torch.randint(VOCABULARY, (4, 129))
    source: Any
    if by == "Trainer":
        source = Trainer(net, "adamw", {"learning_rate": 1e-4})
        update = partial(source.step, 1)
    else:
        source = torch.optim.AdamW(net.parameters(), lr=1e-4)
        update = source.step

    def step() -> torch.Tensor:
        loss = cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        source.zero_grad()
        loss.backward()
        update()
        return loss

    return step, source


def training(by: str, count: int, recorded: bool, to: Sequence[Any] = ()) -> Callable[[], object]:
    """A function that takes so many steps of a small GPT-2, recorded for these loggers."""
    step, source = gpt2_steps(by)
    note = Recorder(source, to=to) if recorded else None

    def steps() -> None:
        for _ in range(count):
            loss = step()
            if note is not None:
                note.step(loss=loss)
            else:
                loss.item()

    return steps


WIDTH, HEADS, BLOCKS, VOCABULARY, PLACES = 192, 6, 12, 4096, 128


class Block(nn.Module):
    """One of GPT-2's blocks, 12 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.attend(self.first(x)).chunk(3, dim=-1))
        x = x + self.join(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class SmallGPT2(nn.Module):
    """GPT-2's 148 tensors (Radford et al. 2019), narrower, with fewer words; the head shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.blocks, self.last = nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.last(self.blocks(x)) @ self.words.weight.T
