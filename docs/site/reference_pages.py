"""Pages of the reference, made of docstrings by mkdocstrings: one for each public module."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import tristep
from tristep import amp, initializer, kernels, kvstore, lr_scheduler, optim, optimizer, viz
from tristep.kernels import transforms
from tristep.trainer.optimizer import Optimizer

__all__ = ["write"]

MODULES: dict[str, tuple[str, ModuleType]] = {
    "tristep": ("Trainer, training and loading", tristep),
    "optimizer": ("Options and bases of optimizers", optimizer),
    "lr_scheduler": ("Learning-rate schedules", lr_scheduler),
    "initializer": ("Initializers", initializer),
    "kvstore": ("Stores and compression", kvstore),
    "amp": ("Loss scaling", amp),
    "optim": ("torch.optim's interface", optim),
    "kernels": ("Rules and updates", kernels),
    "transforms": ("Transforms of rules", transforms),
    "viz": ("Views and recording", viz),
}


def write(pages: Path) -> list[dict[str, str]]:
    """Write the pages; the contents."""
    (pages / "reference").mkdir()
    contents = []
    for name, (title, module) in MODULES.items():
        page = f"reference/{name}.md"
        text = f"# {title}\n\n`{_name_of(module)}`\n\n" + "\n".join(f"::: {path}\n" for path in _documented(module))
        (pages / page).write_text(text, encoding="utf-8")
        contents.append({title: page})
    return contents


def _documented(module: ModuleType) -> list[str]:
    """Where the classes and functions that a module exports are defined; each once, and not those that have other pages."""
    found: dict[str, None] = {}
    for name in module.__all__:
        value: Any = getattr(module, name)
        is_optimizer = inspect.isclass(value) and issubclass(value, Optimizer) and hasattr(value, "rule")
        if not (inspect.isclass(value) or inspect.isfunction(value)) or not value.__module__.startswith("tristep."):
            continue
        if not _is_written(value):
            continue
        if inspect.getdoc(value) and not (is_optimizer and "Source:" in (inspect.getdoc(value) or "")):
            found[f"{value.__module__}.{value.__qualname__}"] = None
    return list(found)


def _is_written(value: Any) -> bool:
    """Whether there is source text for mkdocstrings. Classes of `tristep.optim` that are made of optimizers have none."""
    try:
        inspect.getsource(value)
    except (OSError, TypeError):
        return False
    return True


def _name_of(module: ModuleType) -> str:
    return "tristep" if module is tristep else f"tristep.{module.__name__.split('.')[-1]}"
