"""The product's structure: no import cycles, no private names of other modules."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sample(0)  # it reads all of the product
FOLDERS = {
    "kernels": "tristep.kernels",
    "trainer": "tristep.trainer",
    "viz": "tristep.viz",
    "contrib": "tristep.contrib",
    "src/tristep/integrations": "tristep.integrations",
}


@cache
def _modules():
    """The product's modules by name: their paths and syntax trees."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found


def _imports(name, body):
    """What a module imports from others of the product as soon as it is imported: pairs of a module and a name."""
    path, _ = _modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [node.module])])
            yield from ((base, alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _imports(name, [*node.body, *getattr(node, "orelse", ())])


def _cycles(graph):
    """Sets of modules of which each imports each other, directly or not."""
    reached = {}

    def visit(start):
        seen, waiting = set(), [start]
        while waiting:
            for other in graph[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return seen

    for name in graph:
        reached[name] = visit(name)
    return {frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]}


def test_no_private_name_is_imported():
    found = {
        f"{name}: {base}.{imported}"
        for name, (_, tree) in _modules().items()
        for base, imported in _imports(name, (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)))
        if imported.startswith("_")
    }
    assert not found


def test_no_modules_import_each_other():
    graph = {}
    for name, (_, tree) in _modules().items():
        targets = {
            f"{base}.{imported}" if f"{base}.{imported}" in _modules() else base
            for base, imported in _imports(name, tree.body)
        }
        # A package's own __init__ collects its modules, which may be imported without it.
        graph[name] = {target for target in targets if target in _modules() and not name.startswith(f"{target}.")}
    assert not _cycles(graph)
