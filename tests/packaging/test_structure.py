"""The product's structure: small files and classes, no import cycles, no private names taken from other modules.

Files of tests and benchmarks are small, too.

Each table of exceptions can only shrink: an entry that is no longer needed fails, too.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "kernels": "tristep.kernels",
    "trainer": "tristep.trainer",
    "viz": "tristep.viz",
    "src/tristep/integrations": "tristep.integrations",
}
MOST_LINES, MOST_PARAMETERS, MOST_MEMBERS = 400, 12, 25

LONG_FILES: set[str] = {
    "kernels/backends/eager.py",
    "kernels/update.py",
    "tests/trainer/test_interrupts.py",
    "tests/trainer/test_kvstore.py",
    "tests/trainer/test_optim_adapters.py",
    "tests/trainer/test_optim_multi.py",
    "tests/trainer/test_optim_state.py",
    "tests/trainer/test_paths.py",
    "trainer/files.py",
    "trainer/optim/adapters.py",
    "trainer/optimizer/base.py",
    "trainer/trainer.py",
    "tests/viz/test_extension.py",
    "viz/live/loop.py",
}
MANY_PARAMETERS = {  # they take functions, which in a tuple would not be in the key of Triton's cache
    "tristep.kernels.compress.triton._kernel",
    "tristep.kernels.compress.triton._put_message",
    "tristep.kernels.compress.triton._tile",
}
LARGE_CLASSES = {
    # public faces, whose members users know from MXNet or torch
    "tristep.kernels.language.tensor_rule.TensorRule",
    "tristep.kernels.update.Update",
    "tristep.trainer.core.TrainerCore",
    "tristep.trainer.kvstore.server.store.ServerStore",
    "tristep.trainer.lr_scheduler.base.LRScheduler",
    "tristep.trainer.optim.base.FusedOptimizer",
    "tristep.trainer.optimizer.base.Optimizer",
    "tristep.trainer.optimizer.multi.MultiOptimizer",
    "tristep.trainer.optimizer.rule_optimizer.RuleOptimizer",
    "tristep.trainer.saving.manager.CheckpointManager",
    "tristep.trainer.telemetry.Telemetry",
    "tristep.viz.live.loop.LiveLoop",
    "tristep.viz.views.display.Display",
    "tristep.viz.views.view.View",
}
PRIVATE_IMPORTS: set[str] = set()
CYCLES: set[frozenset[str]] = set()


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


def _functions(name):
    for node in ast.walk(_modules()[name][1]):
        if isinstance(node, ast.FunctionDef):
            yield node


def _arguments(function):
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg not in ("self", "cls")]


def _members(node):
    """Methods, properties and the attributes that methods assign."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                names.add(inner.attr)
    return names


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


def test_files_are_short():
    paths = [path for path, _ in _modules().values()]
    paths += [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {name for name, length in lengths.items() if length > MOST_LINES} == LONG_FILES


def test_functions_have_few_parameters():
    found = {
        f"{name}.{function.name}"
        for name in _modules()
        for function in _functions(name)
        if len(_arguments(function)) > MOST_PARAMETERS and function.name.startswith("_") and function.name != "__init__"
    }
    assert found == MANY_PARAMETERS


def test_classes_are_small():
    classes = {
        f"{name}.{node.name}": len(_members(node))
        for name, (_, tree) in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, members in classes.items() if members > MOST_MEMBERS} == LARGE_CLASSES


def test_no_private_name_is_imported():
    found = {
        f"{name}: {base}.{imported}"
        for name, (_, tree) in _modules().items()
        for base, imported in _imports(name, ast.walk(tree))
        if imported.startswith("_")
    }
    assert found == PRIVATE_IMPORTS


def test_no_modules_import_each_other():
    graph = {}
    for name, (_, tree) in _modules().items():
        targets = {
            f"{base}.{imported}" if f"{base}.{imported}" in _modules() else base
            for base, imported in _imports(name, tree.body)
        }
        # A package's own __init__ collects its modules, which may be imported without it.
        graph[name] = {target for target in targets if target in _modules() and not name.startswith(f"{target}.")}
    assert _cycles(graph) == CYCLES
