"""A page for each optimizer, made of the registry: formula, rule, arguments, bytes, a race and the sources."""

from __future__ import annotations

import importlib.util
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import formulas
import text_pages
from latex2mathml.converter import convert

from tristep import viz
from tristep.kernels import Rule, TensorRule
from tristep.kernels.language.shaped_rule import ShapedRule
from tristep.trainer.optimizer import create, registered

__all__ = ["write"]

RACE = "rosenbrock"
COLUMNS = ("name", "what", "state", "bytes", "engines", "arguments", "source")


def write(root: Path, pages: Path, raced: list[str] | None = None) -> list[Any]:
    """Write the pages; the contents. `raced` are the names of those whose races are drawn; None means all."""
    spec = importlib.util.spec_from_file_location("build_optimizers", root / "docs" / "build_optimizers.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    (pages / "optimizers").mkdir()
    rows = {}
    own = {name: cls for name, cls in registered().items() if cls.__module__.startswith("tristep.")}
    for name, cls in own.items():
        row = dict(
            zip(COLUMNS, (cell.strip() for cell in table.row(name, cls).strip().strip("|").split(" | ")), strict=True)
        )
        rows[cls.__name__] = f"optimizers/{name}.md"
        race = _race(name, pages) if raced is None or name in raced else ""
        (pages / "optimizers" / f"{name}.md").write_text(_page(root, cls, row, race), encoding="utf-8")
    text = (root / "docs" / "optimizers.md").read_text(encoding="utf-8")
    text = text_pages.linked(text, "docs/optimizers.md", "optimizers/index.md", root, pages)
    linked = re.sub(
        r"^\| (\w+) \|", lambda m: f"| [{m[1]}]({rows[m[1]].split('/')[1]}) |" if m[1] in rows else m[0], text, flags=re.M
    )
    (pages / "optimizers" / "index.md").write_text(text_pages.page(linked, "docs/build_optimizers.py"), encoding="utf-8")
    return ["optimizers/index.md", *({name: page} for name, page in rows.items())]


def _page(root: Path, cls: type, row: dict[str, str], race: str) -> str:
    optimizer = create(cls.__name__.lower())
    rule = optimizer.rule  # type: ignore[attr-defined]
    function = inspect.unwrap(rule.fn)
    parts = [
        f"# {cls.__name__}",
        row["what"],
        f'```python\ntrainer = tristep.Trainer(net, "{cls.__name__.lower()}", {{"learning_rate": {optimizer.lr}}})\n```',
        f"**Source**: {row['source']}",
        "## Formula",
        _formula(rule),
        *_with_momentum(cls, rule),
        "## What it keeps and moves",
        f"- State of each parameter: {row['state']}",
        f"- Bytes that a step moves for each float32 element: {row['bytes'] or 'depends on the shape'}",
        f"- Engines: {row['engines']}",
        "[How states are stored](index.md) has the options for fewer bytes." if isinstance(rule, Rule) else "",
        race,
        "## Rule",
        "As it is compiled for every engine:" if isinstance(rule, Rule) else "In torch's operations:",
        f"```python\n{textwrap.dedent(inspect.getsource(function))}```",
        f"::: {cls.__module__}.{cls.__qualname__}\n    options:\n      members: false\n      show_root_toc_entry: true\n",
    ]
    lines = "\n\n".join(filter(None, parts)) + "\n"
    lines = lines.replace("\n\n- Bytes", "\n- Bytes").replace("\n\n- Engines", "\n- Engines")
    return text_pages.page(lines, Path(inspect.getfile(function)).resolve().relative_to(root).as_posix())


def _formula(rule: Any) -> str:
    """What its docstring says, its assignments, and what their symbols are called in the code."""
    said = [_said(inspect.getdoc(inspect.unwrap(rule.fn)) or "")]
    if isinstance(rule, ShapedRule):
        return "\n\n".join([*said, *(_formula(part) for part in rule.rules)])
    if isinstance(rule, TensorRule):
        return said[0]
    steps = formulas.steps(rule)
    lines = "".join(convert(formulas.latex(step), display="block") for step in steps)
    used = {name.rstrip("'") for step in steps for name in (step.target, *formulas.names(step.value))}
    called = [f"<span>{convert(symbol)}</span> is `{name}`" for name, symbol in formulas.SYMBOLS.items() if name in used]
    if any(name.startswith("correction") for name in used):
        called.append(f"<span>{convert('t')}</span> counts the parameter's updates")
    legend = f"Here {', '.join(called)}." if called else ""
    return "\n\n".join([*said, f'<div class="formula">{lines}</div>', legend])


def _with_momentum(cls: type, rule: Any) -> list[str]:
    """The formula of the rule that the optimizer takes for a momentum, if it is another one."""
    if "momentum" not in inspect.signature(cls).parameters:
        return []
    other = create(cls.__name__.lower(), momentum=0.9).rule  # type: ignore[attr-defined]
    return [] if other.name == rule.name else [f"### With `momentum`\n\n{_formula(other)}"]


def _said(text: str) -> str:
    """A docstring as Markdown in which only code is marked."""
    parts = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(" "):
            parts.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
            continue
        codes = re.split(r"(`[^`]+`)", " ".join(paragraph.split()))
        plain = (code if k % 2 else re.sub(r"([*_])", r"\\\1", code.replace("<", "&lt;")) for k, code in enumerate(codes))
        parts.append("".join(plain))
    return "\n\n".join(filter(None, parts))


def _race(name: str, pages: Path) -> str:
    """A picture of it on a function of two variables, next to SGD, each at its best learning rate."""
    try:
        view = viz.TrajectoryView(RACE, [name] if name == "sgd" else ["sgd", name])
    except ValueError as error:
        return f"## Race\n\nNo picture: {error}."
    figure = view.figure()
    figure.savefig(pages / "optimizers" / f"{name}.png", dpi=80)
    view.close()
    return f"## Race\n\nOn Rosenbrock's function, at its best learning rate of a search.\n\n![{view.describe()}]({name}.png)"
