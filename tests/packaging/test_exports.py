"""What a module defines by `@rule` or registers by `@register` is exported, and nothing else is."""

from importlib import import_module
from pathlib import Path

import tristep
from tristep.kernels import Rule, ShapedRule, TensorRule, rules

ROOT = Path(__file__).parents[2]
NOT_LISTED = {"one_bit", "two_bit", "adamw_of_vectors", "direction", "moved", "prodigy", "soap"}
# Those that torch has under another or the same name, and those that have no adapter.
WITHOUT_ADAPTER = {"AdaDelta", "AdaGrad", "Nadam", "RMSProp", "GroupAdaGrad", "LBSGD", "Test", "ccSGD"}


def _ours():
    return {klass.__name__ for klass in tristep.optimizer.registered().values() if klass.__module__.startswith("tristep.")}


def test_every_rule_is_exported():
    found = set()
    for path in (ROOT / "kernels" / "rules").glob("[!_]*.py"):
        module = import_module(f"tristep.kernels.rules.{path.stem}")
        own = {name: value for name, value in vars(module).items() if isinstance(value, (Rule, TensorRule))}
        own = {name: value for name, value in own.items() if value.__module__ == module.__name__}
        assert all(getattr(rules, name) is value for name, value in own.items())
        found |= set(own)
    assert len(found) > 50
    chosen = {rule.name for name in found if isinstance(shaped := getattr(rules, name), ShapedRule) for rule in shaped.rules}
    assert set(rules.__all__) == found - NOT_LISTED - chosen
    assert len(rules.__all__) == len(set(rules.__all__))


def test_every_optimizer_is_exported():
    names = {"MultiOptimizer", "Optimizer", "RuleOptimizer", "Updater"}
    names |= {"Option", "create", "get_updater", "register", "register_option", "registered"}
    assert len(_ours()) > 35
    assert sorted(tristep.optimizer.__all__) == sorted(names | _ours())
    for klass in tristep.optimizer.registered().values():
        assert getattr(tristep.optimizer, klass.__name__, klass) is klass


def test_every_optimizer_has_a_class_with_torchs_interface():
    assert _ours() - set(tristep.optim.__all__) == WITHOUT_ADAPTER
    assert len(tristep.optim.__all__) == len(set(tristep.optim.__all__))
    for name in tristep.optim.__all__:
        assert getattr(tristep.optim, name).__module__.startswith("tristep.")


def test_modules_of_a_package_with_two_names_are_not_executed_twice():
    """`tristep.optimizer` is `tristep.trainer.optimizer`; the others likewise."""
    for name, place, module in (
        ("optimizer", "optimizer", "settings"),
        ("kvstore", "kvstore", "base"),
        ("kv", "kvstore", "local"),
        ("initializer", "initializer", "base"),
        ("init", "initializer", "basic"),
    ):
        assert import_module(f"tristep.{name}.{module}") is import_module(f"tristep.trainer.{place}.{module}")
