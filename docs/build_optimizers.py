"""Writes docs/optimizers.md from the registry: `python docs/build_optimizers.py`. A test holds the page against it."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path

from tristep.kernels import Rule
from tristep.trainer import optim
from tristep.trainer.optim import ports
from tristep.trainer.optimizer import Optimizer, RuleOptimizer, create, registered
from tristep.trainer.optimizer.muon import Muon, WithOrthogonalization
from tristep.trainer.optimizer.options import OPTIONS

COMMON = [name for base in (RuleOptimizer, Optimizer) for name in inspect.signature(base.__init__).parameters]
PAGE = Path(__file__).with_name("optimizers.md")
QUALITY = PAGE.parents[1] / "benchmarks" / "results" / "quality_cpu.json"

HEAD = """\
# Optimizers

Made by `docs/build_optimizers.py` from what is registered; a name goes into `Trainer(params, "name", {{...}})`, in any case.

- **State** is what is kept of each parameter: tensors of its shape, float32 (float64 for float64 weights). Numbers kept once
  for each tensor are in italics, tensors of other shapes in brackets. It is given for the default arguments.
- **Bytes** are what a step must move for each float32 element: every input read once, every output written once, and once
  more what a norm needs.
- **Engines**: rules written once run on all three; "torch" stands for rules of whole matrices, in torch's own operations.
- In addition to its own **arguments**, each takes those of every optimizer: learning_rate, wd, rescale_grad, clip_gradient,
  lr_scheduler, schedules, begin_num_update, multi_precision, param_idx2name, param_dict; those on all three engines also
  the options
  {options}
  (see `tristep.optimizer.RuleOptimizer`). Lookahead keeps one more state, which only its synchronisations read and write,
  and ema_decay one that is read and written at every step; clip_norm, skip_norm and skip_nonfinite together read the
  gradients once more, agc also the weights, cautious all that the rule reads. Those with rules of whole matrices take
  {whole} of these.
- How it is stored: all optimizers with rules take state_dtype, state_device, stochastic_rounding, rounding_seed and
  `multi_precision="remainder"` or `"split8"`. States that are weights or sums over all steps stay float32, and so do the two
  averages whose difference centered RMSProp takes. For each element of AdamW, the bytes that a step moves, and those kept
  in addition to weight and gradient:

  | weight and gradient | options | moved | kept |
  |---|---|---|---|
  | float32 | none | 28 | 8 |
  | float32 | `state_dtype="bfloat16"` | 20 | 4 |
  | float32 | `state_dtype="8bit"` | 16.1 | 2.1 |
  | float32 | `state_dtype="4bit"` | 14.1 | 1.1 |
  | bfloat16 | none, or `stochastic_rounding=True` | 22 | 8 |
  | bfloat16 | `stochastic_rounding=True, state_dtype="bfloat16"` | 14 | 4 |
  | bfloat16 | `stochastic_rounding=True, state_dtype="8bit"` | 10.1 | 2.1 |
  | bfloat16 | `stochastic_rounding=True, state_dtype="4bit"` | 8.1 | 1.1 |
  | bfloat16 | `multi_precision=True` | 28 | 12 |
  | bfloat16 | `multi_precision="remainder"` | 26 | 10 |
  | bfloat16 | the same with `state_dtype="bfloat16"` | 18 | 6 |
  | bfloat16 | the same with `state_dtype="8bit"` | 14.1 | 4.1 |
  | bfloat16 | the same with `state_dtype="4bit"` | 12.1 | 3.1 |
  | bfloat16 | `multi_precision="split8"` | 24 | 9 |
  | bfloat16 | the same with `state_dtype="8bit"` | 12.1 | 3.1 |
  | bfloat16 | the same with `state_dtype="4bit"` | 10.1 | 2.1 |

  States of averages that move by less than 1/256 at a step, such as a variance with a beta2 of 0.999, hardly shrink when
  they are rounded to the nearest bfloat16; `stochastic_rounding=True` rounds them right on average.

  With `multi_precision=True` a step reads the weight beside its float32 master, since the weight counts where it was written
  between steps: 30 bytes an element for AdamW with a bfloat16 weight and gradient.

  With `multi_precision="split8"` the weight as the rule knows it has 24 bits: those of the bfloat16 weight and 8 more, 15 of
  mantissa in all (see `kernels/storage/master.py`). Steps of less than 1/65536 of a weight, which these cannot take, need
  `stochastic_rounding=True`. Masters of one kind are converted to another when they are loaded;
  `trainer.float32_weights()` and `load_float32_weights` take whole weights out of any of them, and back.

  With `state_device="cpu"` the states of a GPU's weights are in memory of the host, with the same numbers: see
  [states in memory of the host](gpu.md#states-in-memory-of-the-host) for what that costs.

  8-bit states are a byte for each element and a float32, their scale, for each 128 of them; 4-bit states are half a byte and
  as many scales (see `kernels/storage/packed.py`). Both are always rounded at random, the same at every run with the same
  `rounding_seed`. Weights of fewer than 4,096 elements, or whose elements are not in C's order, have float32 states; sparse
  gradients need `lazy_update=False`. What an outlier, an infinity or NaN does to its block is in the guide, under very large
  gradients. Of these options torch's own classes in `tristep.optim` have `state_dtype` and `state_device` only: SGD, Adam
  and AdamW as arguments, the others as options of a group. Next to bfloat16 parameters their states are float32, which
  torch's are not, and the parameters are rounded to nearest, as torch's.
  `tristep.optim.as_torch(tristep.optimizer.AdamW)` has all options.

  Small networks trained with AdamW, the loss relative to that with float32 and its standard error, of 10, 5 and 5 seeds: a
  convolutional network on digits, and a transformer on the characters of Python's manual and of its library's source files
  (`benchmarks/quality.py`, `benchmarks/results/quality_cpu.json`):

  | weights | options | digits | text | sources |
  |---|---|---|---|---|
{quality}

  With 24-bit weights, 8-bit states or both the loss is at most 0.2 % above float32's; on digits up to 1.1 % below it, which
  is 1.2 standard errors. 4-bit states train differently: on digits their loss is 4 to 5 % lower, by three to five standard
  errors, on the others equal within two and a half. That is no merit of theirs: a variance of 4 bits is a power of two,
  rounded at random to one of two, so that steps, which are divided by its root, are longer: by up to 4.6 % on average, which
  is the largest value of (1 - (y - 1) (1 - 1 / sqrt(2))) sqrt(y), with y between 1 and 2. Where a longer step harms, so may
  they.
- **torch**: by torch's interface, with torch's arguments and numbers, `tristep.optim` has {classic}; and, with `lr` and
  `weight_decay` for learning_rate and wd, {own}.
- **Where numbers differ** from an author's code or paper, with the same arguments:
  - ScheduleFreeAdamW is the authors' main class `AdamWScheduleFree`, which corrects the average of squares for starting at
    0. Algorithm 1 of the paper (their `AdamWScheduleFreePaper`) has the correction in the learning rate, so in the decay and
    in the weights of the average, too.
  - Muon and NorMuon with `flatten` scale a convolution's step by sqrt(max(1, rows / columns)) of the flattened matrix, 1.89
    for 32 filters of 1 x 3 x 3. Jordan's code and NorMuon's take the kernel's last two dimensions there, which are mostly
    equal: 1. NorMuon's code also normalizes each row of a kernel by itself, where ours normalizes a filter, one row of the
    matrix.
  - Dion2 and NorDion2 with `flatten` choose among the rows or columns of the flattened matrix; microsoft/dion chooses among
    those of each kernel, before it flattens.
  - Dion2 and NorDion2 keep the learning rate on matrices with more columns than rows; by their authors' default it is
    multiplied by sqrt(rows / columns) < 1 there.
  - `coefficients="polar_express"` has the paper's safety factor of 1.01; microsoft/dion and others have 1.02.
  - ASGD of a `Trainer` takes a new learning rate at once. torch's, and `tristep.optim.ASGD`, take it one step later.
  - Rprop of a `Trainer` rests at a rate of 0. torch's, and `tristep.optim.Rprop`, step by the smallest size there.

| name | what it does | state | bytes | engines | arguments | source |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    own = set(optim.__all__) - set(ports.__all__)
    turned = [each for each in OPTIONS if each.changes_rule or (each.of and each.of != "stochastic_rounding")]
    lists = {
        "options": textwrap.fill(", ".join(each.name for each in turned[:-1]), 118, subsequent_indent="  ")
        + f" and {turned[-1].name}",
        "whole": ", ".join(each.name for each in OPTIONS if each.changes_rule and each.takes(Muon())),
        "classic": ", ".join(ports.__all__),
        "own": ", ".join(cls.__name__ for cls in registered().values() if cls.__name__ in own),
    }
    return HEAD.format(**lists, quality=_quality()) + "".join(
        row(name, cls) for name, cls in registered().items() if cls.__module__.startswith("tristep.")
    )


def _quality() -> str:
    """The rows of what was measured."""
    results = json.loads(QUALITY.read_text(encoding="utf-8"))
    options = {
        "8-bit states": 'float32 | `state_dtype="8bit"`',
        "4-bit states": 'float32 | `state_dtype="4bit"`',
        "24-bit weights": 'bfloat16 | `multi_precision="split8"`',
        "24-bit weights, 8-bit states": 'bfloat16 | `multi_precision="split8", state_dtype="8bit"`',
        "24-bit weights, 4-bit states": 'bfloat16 | `multi_precision="split8", state_dtype="4bit"`',
        "bfloat16, 8-bit states, stochastic": 'bfloat16 | `stochastic_rounding=True, state_dtype="8bit"`',
        "bfloat16, stochastic": 'bfloat16 | `stochastic_rounding=True, state_dtype="bfloat16"`',
        "bfloat16, nearest": 'bfloat16 | `state_dtype="bfloat16"`',
    }
    rows = []
    for stored, cells in options.items():
        found = [results[task][stored] for task in ("digits", "text", "sources")]
        ratios = " | ".join(f"{each['ratio']:.3f} ± {each['standard error']:.3f}" for each in found)
        rows.append(f"  | {cells} | {ratios} |")
    return "\n".join(rows)


def row(name: str, cls: type) -> str:
    """The row of an optimizer, as a line of Markdown."""
    optimizer = create(name)
    assert isinstance(optimizer, RuleOptimizer)
    rule = optimizer.rule
    text = inspect.getdoc(cls) or ""
    what = " ".join(text.split("\n\n")[0].split())
    source = re.search(r"Source: (.*?)(?:\n\n|\Z)", text, re.DOTALL)
    passed_on = [each for each in (Muon, WithOrthogonalization) if issubclass(cls, each)]  # by **kwargs
    arguments = dict.fromkeys(
        parameter.name
        for each in (cls, *passed_on)
        for parameter in inspect.signature(each).parameters.values()
        if parameter.kind != parameter.VAR_KEYWORD and parameter.name not in COMMON
    )
    if isinstance(rule, Rule):
        state = [*rule.state, *(f"*{number}*" for number in rule.kept)]
        size = 3 + len(rule.used) + len(rule.changed) + sum(2 + len(reduction.state) for reduction in rule.reductions)
        moved, engines = str(4 * size), "triton, cpu, eager"
    else:
        import torch

        whole = torch.Size((8, 4))
        shapes = zip(rule.state, rule.shapes(whole), strict=True)
        state = [slot if shape == whole else f"[{slot}]" for slot, shape in shapes if shape.numel()]
        moved, engines = "", "torch"
    cells = (
        cls.__name__,
        what,
        ", ".join(state) or "none",
        moved,
        engines,
        ", ".join(arguments),
        " ".join(source[1].split()),
    )
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.name}")
