"""What `import tristep` loads, and that it works where optional libraries are missing."""

import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
from interpreters import run

import tristep

pytestmark = pytest.mark.packaging

OPTIONAL = [
    "triton",
    "numba",
    "llvmlite",
    "safetensors",
    "tqdm",
    "matplotlib",
    "ipywidgets",
    "IPython",
    "sklearn",
    "scipy",
    "pandas",
]

LIBRARIES = ["transformers", "accelerate", "lightning"]  # that integrations are with

# Imports every module below `kernels` and `trainer`. One that cannot do without a missing library may refuse,
# provided that the library is missing to itself and not to a module that it imports.
IMPORT_EVERYTHING_BUT_VIZ = """
    import importlib, pkgutil
    import tristep, tristep.kernels, tristep.trainer
    imported = []
    for package in (tristep.kernels, tristep.trainer):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            try:
                importlib.import_module(module.name)
                imported.append(module.name)
            except ModuleNotFoundError as error:
                of_backend = module.name.startswith(("tristep.kernels.backends.", "tristep.kernels.compress."))
                if error.name.split(".")[0] not in missing or not of_backend:
                    raise
    assert "tristep.trainer.lr_scheduler" in imported, imported
    assert "tristep.kernels.rules" in imported, imported
"""


def _run(code, cwd):
    """Run code in an interpreter that has imported torch alone, warnings as errors, and return what it printed."""
    return "".join(
        f"{line}\n" for line in run("import warnings; warnings.simplefilter('error')\n" + textwrap.dedent(code), cwd)
    )


def _without(names):
    """Code that makes modules look as if they were not installed."""
    return f"import sys; missing = {names!r}; sys.modules.update(dict.fromkeys(missing))\n"


def test_importing_tristep_loads_no_heavy_module_and_names_are_imported_on_first_use(tmp_path):
    code = """
        import sys, tristep, torch
        print(*sys.modules)
        assert not torch.cuda.is_initialized()
        names = "viz", "race", "sweep", "fit", "optim", "init", "amp", "lr_find", "load_mxnet_params"
        assert set(names) <= set(dir(tristep))
        assert tristep.viz.__name__ == "tristep.viz"
        tristep.viz.RaceView
        for name in ("race", "sweep", "fit"):
            assert callable(getattr(tristep.trainer, name))
            assert getattr(tristep, name) is getattr(tristep.trainer, name)
        assert tristep.optim.AdamW and tristep.initializer.Xavier and tristep.amp.scale_loss
        assert tristep.trainer.kvstore.CollectiveStore is tristep.kvstore.CollectiveStore
        from tristep import *
        assert race is tristep.race and init is tristep.init
    """
    loaded = set(_run(code, tmp_path).split())
    assert "tristep" in loaded
    later = {f"tristep.trainer.{name}" for name in ("sweep", "fit", "optim", "initializer", "compression")}
    later |= {"tristep.trainer.kvstore.allreduce", "tristep.viz"}
    later |= {f"tristep.contrib.{name}" for name in ("mxnet_files", "owners", "racing", "server")}
    heavy = {"numba", "matplotlib", "ipywidgets", "IPython", "scipy", "sklearn", "pandas", *LIBRARIES}
    assert loaded.isdisjoint(heavy | later)


def test_pictures_import_what_draws_or_computes_them_when_there_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    code = "import sys; from tristep import viz; viz.View; print(*(name.split('.')[0] for name in sys.modules))"
    assert set(_run(code, tmp_path).split()).isdisjoint({"numba", "matplotlib", "PIL", "ipywidgets", "IPython", "scipy"})


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'tristep' has no attribute 'no_such_name'"):
        tristep.no_such_name  # noqa: B018


@pytest.mark.sample(0)
def test_a_rule_is_not_read_in_a_file_that_has_changed_since_it_was_imported(tmp_path):
    code = f"""
        import shutil, sys
        from pathlib import Path
        shutil.copytree({str(Path(tristep.__file__).parent)!r}, "tristep", ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, "")
        import torch, tristep
        family = Path(tristep.kernels.rules.__path__[0], "adam.py")
        family.write_text("#\\n" + family.read_text(encoding="utf-8"), encoding="utf-8")
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        for name in ("sgd", "adam"):
            try:
                tristep.Trainer([weight], name, engine="eager").step(1)
                print(name)
            except RuntimeError as error:
                print("adam.py has changed since it was imported: start Python" in str(error))
    """
    assert _run(code, tmp_path).split() == ["sgd", "True"]


def test_the_version_is_that_of_the_installed_package():
    import tristep

    assert tristep.__version__ == version("tristep")


@pytest.mark.sample(1)
@pytest.mark.parametrize("missing", [["triton"], ["numba", "llvmlite"], OPTIONAL], ids=["triton", "numba", "all"])
def test_everything_but_viz_imports_without(missing, tmp_path):
    _run(_without(missing) + textwrap.dedent(IMPORT_EVERYTHING_BUT_VIZ), tmp_path)


BARE_STEPS = """
    import torch, tristep
    for engine in {engines!r}:
        weight = torch.nn.Parameter(torch.ones(1000))
        trainer = tristep.Trainer([weight], "sgd", {{"learning_rate": 0.5}}, engine=engine)
        optimizer = tristep.optim.SGD([weight], lr=0.5)
        for step, rate in ((lambda: trainer.step(1), 1.0), (optimizer.step, 1.0)):
            weight.data.fill_(1.0)
            weight.grad = torch.full_like(weight, 0.25)
            step()
            assert set(weight.tolist()) == {{0.875}}, engine
    print(tristep.kernels.choose_engine(torch.device("cpu")))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("present", "engines"), [("triton", ["triton", "eager", None]), ("numba", ["cpu", None])])
def test_steps_need_torch_and_one_compiler_only(present, engines, tmp_path):
    """As in a container with torch and Triton, and on a machine without a GPU, where nothing brings Triton."""
    compilers = {"triton": {"triton"}, "numba": {"numba", "llvmlite"}}[present]
    missing = [name for name in OPTIONAL if name not in compilers]
    code = "import os; os.environ['TRITON_INTERPRET'] = '1'\n" + _without(missing)
    printed = _run(code + textwrap.dedent(BARE_STEPS).format(engines=engines), tmp_path)
    assert printed == {"triton": "eager\n", "numba": "cpu\n"}[present]


@pytest.mark.sample(0)
def test_the_triton_engine_says_where_triton_comes_from(tmp_path):
    code = """
        import torch, tristep
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        try:
            tristep.Trainer([weight], "sgd", engine="triton")
        except ModuleNotFoundError as error:
            print(error)
    """
    printed = _run(_without(["triton"]) + textwrap.dedent(code), tmp_path)
    assert printed.startswith("engine='triton' needs Triton, which is missing: ")
    assert "pip install 'tristep[triton]'" in printed


def test_integrations_need_their_own_library_only(tmp_path):
    code = """
        import tristep
        from tristep.integrations import dcp
        for name, library in {"huggingface": "transformers", "lightning": "lightning"}.items():
            try:
                __import__(f"tristep.integrations.{name}")
            except ModuleNotFoundError as error:
                assert f"needs {library}, which is missing: pip install {library}" in str(error), error
            else:
                raise AssertionError(name)
        assert tristep.integrations.dcp is dcp
        assert "tristep.viz" not in sys.modules
    """
    _run(_without([*OPTIONAL, *LIBRARIES]) + textwrap.dedent(code), tmp_path)
