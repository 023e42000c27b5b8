"""Pages of the reference, made of docstrings by mkdocstrings: one for each public module, of `viz` one for each theme."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import text_pages

import tristep
from tristep import amp, initializer, kernels, kvstore, lr_scheduler, optim, optimizer, viz
from tristep.kernels import transforms
from tristep.trainer.optimizer import Optimizer
from tristep.viz.views.run_view import RunView

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
THEMES = {  # of `viz`: the page of a theme, its title, and where its names are defined; the first that fits has a name
    "viz-runs": ("Views of runs", ("viz.views.dashboard", "viz.views.lr_finder", "contrib.racing", "viz.live.view")),
    "viz-own": ("Scenes: views of your own", ("viz.scene", "viz.views.view", "viz.views.budget")),
    "viz-optimizers": ("Views of optimizers", ("viz.views", "contrib.exercises")),
    "viz-recording": ("Recording", ("viz.record", "contrib.imported_runs")),
    "viz-live": ("Live training", ("viz.live",)),
    "viz-simulation": ("Simulation", ("viz.simulate",)),
    "viz-renderers": ("Renderers", ("viz.render",)),
}


def write(root: Path, pages: Path, repository: str | None) -> list[dict[str, Any]]:
    """Write the pages; the contents. `repository` is its address, for links to the source."""
    (pages / "reference").mkdir()
    contents: list[dict[str, Any]] = []
    for name, (title, module) in MODULES.items():
        values = _documented(module)
        head = f"# {title}\n\n`{_name_of(module)}`\n\n"
        if module is not viz:
            page = _write(root, pages, name, f"{head}{_summary(root, values, repository)}", values, module)
            contents.append({title: page})
            continue
        themes: dict[str, list[Any]] = {theme: [] for theme in THEMES}
        for value in values:
            themes[_theme_of(value)].append(value)
        parts = [
            f"## [{THEMES[theme][0]}]({theme}.md)\n\n{_summary(root, members, repository)}"
            for theme, members in themes.items()
        ]
        chapter: list[Any] = [_write(root, pages, name, head + "\n".join(parts), [], module)]
        for theme, members in themes.items():
            theme_head = f"# {THEMES[theme][0]}\n\n`{_name_of(module)}`\n"
            chapter.append({THEMES[theme][0]: _write(root, pages, theme, theme_head, members, module)})
        contents.append({title: chapter})
    return contents


def _write(root: Path, pages: Path, name: str, head: str, values: list[Any], module: ModuleType) -> str:
    """Write a page with this beginning and the docstrings of these; its path."""
    text = f"{head}\n" + "\n".join(f"::: {_path_of(value)}\n" for value in values)
    page = f"reference/{name}.md"
    (pages / page).write_text(text_pages.page(text, _file_of(root, module)), encoding="utf-8")
    return page


def _theme_of(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, RunView):
        return "viz-runs"
    module = value.__module__.removeprefix("tristep.")
    return next(theme for theme, (_, places) in THEMES.items() if module.startswith(places))


def _summary(root: Path, values: list[Any], repository: str | None) -> str:
    """A table of names with the first lines of their docstrings, and where they are in the source."""
    rows = ["| name | what it is | source |", "|---|---|---|"]
    for value in values:
        first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", r"\|")
        file, line = _file_of(root, value), inspect.getsourcelines(inspect.unwrap(value))[1]
        source = f"[{file}:{line}]({repository}/blob/main/{file}#L{line})" if repository else f"`{file}:{line}`"
        rows.append(f"| [`{value.__name__}`][{_path_of(value)}] | {first} | {source} |")
    return "\n".join(rows) + "\n"


def _file_of(root: Path, value: Any) -> str:
    return Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve().relative_to(root).as_posix()


def _path_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _documented(module: ModuleType) -> list[Any]:
    """The classes and functions that a module exports; each once, and not those that have other pages."""
    found: dict[str, Any] = {}
    for name in module.__all__:
        value: Any = getattr(module, name)
        is_optimizer = inspect.isclass(value) and issubclass(value, Optimizer) and hasattr(value, "rule")
        if not (inspect.isclass(value) or inspect.isfunction(value)) or not value.__module__.startswith("tristep."):
            continue
        if not _is_written(value):
            continue
        if inspect.getdoc(value) and not (is_optimizer and "Source:" in (inspect.getdoc(value) or "")):
            found[_path_of(value)] = value
    return list(found.values())


def _is_written(value: Any) -> bool:
    """Whether there is source text for mkdocstrings. Classes of `tristep.optim` that are made of optimizers have none."""
    try:
        inspect.getsource(value)
    except (OSError, TypeError):
        return False
    return True


def _name_of(module: ModuleType) -> str:
    return "tristep" if module is tristep else f"tristep.{module.__name__.split('.')[-1]}"
