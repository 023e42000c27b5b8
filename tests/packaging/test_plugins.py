"""docs/plugins.md, tried: its package, as pip would install it, is found by name; and what bad plugins raise."""

import re
import textwrap
from pathlib import Path

import pytest
from interpreters import run

tomllib = pytest.importorskip("tomllib")  # Python 3.11
pytestmark = pytest.mark.packaging

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
PROJECT = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]
MODULE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]


def _install(folder, entries, module, name="tristep_tempered"):
    """What pip leaves in site-packages of a package with one module and these entry points."""
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items()) for group, each in entries.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def test_the_package_of_the_page_is_found_by_its_names(tmp_path):
    _install(tmp_path, tomllib.loads(PROJECT)["project"]["entry-points"], MODULE)
    code = """
        import sys, torch, tristep
        weights = [torch.nn.Parameter(torch.full((2,), 4.0)) for _ in range(2)]
        nets = [torch.nn.ParameterList([weight]) for weight in weights]
        trainer = tristep.Trainer(nets, "tempered", {"learning_rate": 1.0}, kvstore="meanstore", engine="eager")
        assert "tristep_tempered" in sys.modules
        for weight, gradient in zip(weights, (1.0, 5.0)):
            weight.grad = torch.full((2,), gradient)
        trainer.step(1)
        print([weight.tolist() for weight in weights])  # 4 - 3 / (3 + 1)
        message = tristep.kvstore.create_compressor({"type": "halved"}).encode(torch.ones(2))
        print(message.dtype)
        weight = torch.zeros(2)
        tristep.initializer.create("sevens")("fc_weight", weight)
        print(weight.tolist())
        print(tristep.viz.GradientNormView([1.0, 0.5]).scene().title)
        weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        for name, options in (("sgd", {}), ("adamw", {"ema_decay": 0.5, "clip_norm": 1.0})):
            trainer = tristep.Trainer([weight], name, {"learning_rate": 1.0, "smallest": -0.5, **options}, engine="eager")
            weight.grad = torch.tensor([5.0, 0.0])
            trainer.step(1)
            print(weight.tolist(), trainer.optimizer.smallest)
            trainer.save_states("states")
            other = tristep.Trainer([weight], name, {"learning_rate": 1.0, **options}, engine="eager")
            other.load_states("states")
            print(repr(other.optimizer).count("smallest=-0.5"))
        for listed in (tristep.optimizer.registered(), tristep.initializer.registered()):
            print(*{"tempered", "sevens"} & set(listed))
    """
    assert run(code, tmp_path) == [
        "[[3.25, 3.25], [3.25, 3.25]]", "torch.float16", "[7.0, 7.0]", "Gradient norm",
        "[-0.5, -0.5] -0.5", "1", "[-0.5, -0.5] -0.5", "1", "tempered", "sevens",
    ]  # fmt: skip


def test_a_file_with_an_option_finds_it(tmp_path):
    """In a process that has not used it; and bad options are refused by name."""
    entries = tomllib.loads(PROJECT)["project"]["entry-points"]
    bad = {name: f"bad_options:{name}" for name in ("agcc", "wide", "learning", "none")}
    _install(tmp_path, {"tristep.options": entries["tristep.options"]}, MODULE)
    module = """
        from tristep.optimizer import Option
        from tristep.trainer.validation import number
        change = lambda optimizer, rule, sync: rule
        agcc, wide, none = 3, Option("wider", None, number, transform=change), Option("none", None, number)
        learning = Option("lr_mult", None, number, transform=change)
    """
    _install(tmp_path, {"tristep.options": bad}, textwrap.dedent(module), "bad_options")
    make = """
        import torch, tristep
        weight = torch.nn.Parameter(torch.ones(2))
    """
    code = """
        trainer = tristep.Trainer([weight], "sgd", {"smallest": 0.5}, engine="eager")
        weight.grad = torch.ones(2)
        trainer.step(1)
        trainer.save_states("states")
    """
    assert run(textwrap.dedent(make) + textwrap.dedent(code), tmp_path) == []
    code = """
        trainer = tristep.Trainer([weight], "sgd", engine="eager")
        trainer.load_states("states")
        print(trainer.optimizer.smallest, trainer.optimizer.composed_rule.name)
        for name in ("agcc", "wide", "none", "smalest"):
            try:
                tristep.optimizer.create("adam", **{name: 1.0})
            except Exception as error:
                print(type(error).__name__, error)
        from bad_options import learning
        for bad in (learning, 3):
            try:
                tristep.optimizer.register_option(bad)
            except Exception as error:
                print(type(error).__name__, error)
    """
    found, agcc, wide, none, unknown, taken, kind = run(textwrap.dedent(make) + textwrap.dedent(code), tmp_path)
    assert found == "0.5 sgd_not_below"
    assert agcc == "ValueError 'agcc' in the entry points 'tristep.options' is 3: must be an Option of that name"
    assert "must be an Option of that name" in wide
    assert none.startswith("TypeError option must be a tristep.optimizer.Option with a transform")
    assert unknown.startswith("TypeError Adam has no argument 'smalest'")
    assert taken == "ValueError option 'lr_mult': optimizers have an argument or attribute of this name; choose another"
    assert kind.startswith("TypeError option must be a tristep.optimizer.Option with a transform, got 3")


def test_plugins_that_do_not_fit_are_refused_by_name(tmp_path):
    entries = {
        "tristep.optimizers": {
            "broken": "plugin_of_mine:Missing",
            "number": "plugin_of_mine:NUMBER",
            "lbsgd": "plugin_of_mine:X",
        },
        "tristep.stores": {"Mixed": "plugin_of_mine:X"},
        "tristep.viz": {"NumberView": "plugin_of_mine:NUMBER"},
    }
    _install(tmp_path, entries, "NUMBER = 3\n", "plugin_of_mine")
    code = """
        import tristep
        for name in ("broken", "number", "lbsgd", "brokn"):
            try:
                tristep.optimizer.create(name)
            except Exception as error:
                print(type(error).__name__, error)
        for look in (lambda: tristep.kvstore.create("Mixed"), lambda: tristep.viz.NumberView):
            try:
                look()
            except Exception as error:
                print(type(error).__name__, error)
    """
    broken, number, twice, unknown, mixed, view = run(code, tmp_path)
    assert mixed == "ValueError 'Mixed' in the entry points 'tristep.stores': the name must be in lower case"
    assert view == "TypeError 'NumberView' in the entry points 'tristep.viz' is 3: it must be a subclass of View"
    assert broken.startswith(
        "ImportError 'broken', which the entry points 'tristep.optimizers' declare as plugin_of_mine:Missing"
    )
    assert number == "TypeError 'number' in the entry points 'tristep.optimizers' is 3: it must be a subclass of Optimizer"
    assert twice.startswith(
        "ValueError 'lbsgd' in the entry points 'tristep.optimizers' means both plugin_of_mine:X and tristep."
    )
    assert unknown.startswith("ValueError optimizer='brokn'")
    assert "Did you mean 'broken'" in unknown


def test_an_entry_point_has_the_name_of_its_class(tmp_path):
    """By that name files and messages call it."""
    groups = {"optimizers": "Plain", "initializers": "Fives", "compressors": "Whole"}
    entries = {f"tristep.{group}": {"MyName": f"named_plugin:{name}"} for group, name in groups.items()}
    module = """
        from tristep import initializer, kvstore, optimizer
        class Plain(optimizer.SGD): pass
        class Fives(initializer.One): pass
        class Whole(kvstore.Compressor):
            def __init__(self, **kwargs): pass
            def encode(self, values): return values
            def decode(self, message, n): return message
    """
    _install(tmp_path, entries, textwrap.dedent(module), "named_plugin")
    code = """
        import tristep
        for create in (tristep.optimizer.create, tristep.initializer.create, tristep.kvstore.create_compressor):
            try:
                create({"type": "MyName"} if create is tristep.kvstore.create_compressor else "MyName")
            except ValueError as error:
                print(str(error).partition("must ")[2])
        from named_plugin import Whole
        tristep.kvstore.register_compressor(Whole)
        try:
            tristep.kvstore.create_compressor({"type": "whole", "extra": 1})
        except ValueError as error:
            print(error)
    """
    expected = [f"have its name, '{name}'" for name in ("plain", "fives", "whole")]
    expected.append("compression_params has the key 'extra': 'whole' takes 'type', 'error_feedback'.")
    assert [line.replace("the entry point ", "") for line in run(code, tmp_path)] == expected


def test_the_doctor_lists_the_plugins_and_imports_none(tmp_path):
    code = """
        import sys
        from tristep.__main__ import main
        status = main(["doctor"])
        assert status == 0 and "tristep_tempered" not in sys.modules
    """
    assert "plugins" not in run(code, tmp_path)
    entries = tomllib.loads(PROJECT)["project"]["entry-points"]
    _install(tmp_path, entries | {"tristep.optimiser": {"tempered": "tristep_tempered:Tempered"}}, MODULE)
    lines = run(code, tmp_path)
    start = lines.index("plugins") + 1
    assert lines[start : start + 8] == [
        "  halved         in tristep.compressors: tristep_tempered:Halved, of tristep_tempered 1.0",
        "  sevens         in tristep.initializers: tristep_tempered:Sevens, of tristep_tempered 1.0",
        "  tempered       in tristep.optimiser: tristep_tempered:Tempered, of tristep_tempered 1.0; unknown group",
        "  tempered       in tristep.optimizers: tristep_tempered:Tempered, of tristep_tempered 1.0",
        "  smallest       in tristep.options: tristep_tempered:smallest, of tristep_tempered 1.0",
        "  meanstore      in tristep.stores: tristep_tempered:MeanStore, of tristep_tempered 1.0",
        "  GradientNormView in tristep.viz: tristep_tempered:GradientNormView, of tristep_tempered 1.0",
        "",
    ]


def test_a_package_installed_in_the_session_is_found_and_its_files_are_read_once(tmp_path):
    module = "import tristep\nclass Late(tristep.optimizer.SGD): pass\n"
    _install(tmp_path, {"tristep.optimizers": {"late": "late_plugin:Late"}}, module, "late_plugin")
    (tmp_path / "late_plugin-1.0.dist-info").rename(tmp_path / "apart")  # as if pip had not come yet
    code = """
        import importlib.metadata, pathlib, sys, tristep
        scans, scan = [], importlib.metadata.entry_points
        tristep.trainer.plugins.entry_points = lambda **group: scans.append(group) or scan(**group)
        before = [set(tristep.optimizer.registered()) for _ in range(3)]
        folder = pathlib.Path(sys.path[0])
        (folder / "apart").rename(folder / "late_plugin-1.0.dist-info")
        after = set(tristep.optimizer.registered())
        print(*after - before[-1], len(scans), type(tristep.optimizer.create("late")).__name__)
    """
    assert run(code, tmp_path) == ["late 2 Late"]


def test_a_class_of_the_session_replaces_one_of_contrib_with_a_warning_and_stays(tmp_path):
    code = """
        import warnings, tristep
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            @tristep.optimizer.register
            class ccSGD(tristep.optimizer.SGD):
                pass
        print(len(caught), "tristep.contrib.optimizers:ccSGD" in str(caught[0].message))
        tristep.optimizer.create("lbsgd")
        tristep.optimizer.registered()
        print(type(tristep.optimizer.create("ccsgd")) is ccSGD)
    """
    assert run(code, tmp_path) == ["1 True", "True"]
