"""What `import tristep` loads, and that it works where optional libraries are missing."""

import textwrap
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


def test_completions_have_the_names_that_are_imported_on_first_use(tmp_path):
    code = """
        import importlib
        for name in ("optim", "optimizer", "initializer", "kvstore", "trainer", "viz"):
            module = importlib.import_module(f"tristep.{name}")
            print(*sorted(set(module.__all__) - set(dir(module))))
    """
    assert not _run(code, tmp_path).split()


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
