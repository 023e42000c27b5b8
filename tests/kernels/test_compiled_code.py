"""Compiled code on disk: read by other processes, compiled anew after a change, and done without where it cannot be."""

import itertools
import os
import subprocess
import sys
import tempfile

import pytest

from tristep.kernels.backends import has_numba

needs_numba = pytest.mark.skipif(not has_numba(), reason="needs numba")

STEP = """
import importlib.util, math, sys
from pathlib import Path
import torch
import numba.core.event
recorder = numba.core.event.RecordingListener()
numba.core.event.register("numba:compile", recorder)
from tristep.kernels import Update, rules
from tristep.kernels.backends.cpu import loops

def step(rule=rules.sgd):
    '''One step of little work, and one for threads.'''
    for size in (3, 200_000):
        weight, gradient = torch.ones(size), torch.ones(size)
        run = Update(rule, [weight], [()], engine="cpu")
        run.hyper[:] = [1.0, 0.25, 0.0, math.inf][: run.hyper.shape[1]]
        run.bind([gradient])
        run()
        assert weight.unique().tolist() == [0.75], weight
"""

REPORT = """
print(len(loops.loops), any(event.is_start for _, event in recorder.buffer))
"""


@pytest.fixture
def native_script(tmp_path, fresh_python):
    """A function that runs a script after STEP, with this cache folder, and gives the words it printed."""
    count = 0

    def run(text, cache):
        nonlocal count
        count += 1
        script = tmp_path / f"script_{count}.py"
        script.write_text(STEP + text, encoding="utf-8")
        return fresh_python(script, NUMBA_CACHE_DIR=str(cache), PYTHONDONTWRITEBYTECODE="1").split()

    return run


def _kept(folder):
    """The files in a folder of compiled code, without the bytecode that Python keeps of generated modules."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sorted(path.relative_to(folder) for path in files)


@pytest.mark.sample(0)
@needs_numba
def test_another_process_compiles_nothing_again(native_script, tmp_path):
    cache = tmp_path / "cache"
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "True"]
    kept = _kept(cache)
    assert sorted({path.suffix for path in kept}) == [".nbc", ".nbi", ".py"]
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "False"]
    assert _kept(cache) == kept


@pytest.mark.sample(0)
@needs_numba
def test_a_damaged_loop_is_written_again(native_script, tmp_path):
    for _ in range(2):
        assert native_script(f"step()\n{REPORT}", tmp_path / "cache")[0] == "1"
        for path in (tmp_path / "cache").glob("*.py"):
            path.write_text("raise SystemExit('damaged')", encoding="utf-8")


MODULE = """
from tristep.kernels import rule

@rule
def mine(w, g, state, hyper):
    (lr,) = hyper
    return w - {}lr * g, state
"""

LOAD = """
spec = importlib.util.spec_from_file_location("{name}", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules["{name}"] = module
spec.loader.exec_module(module)
step(module.mine)
"""


@pytest.mark.sample(0)
@needs_numba
def test_the_text_of_a_rule_decides_and_not_its_file(native_script, tmp_path):
    """The file may have been renamed since; a rule that was changed in its file is compiled anew."""
    cache = tmp_path / "cache"
    for name, factor, compiled in [("first", "", "True"), ("second", "", "False"), ("second", "1.0 * ", "True")]:
        path = tmp_path / f"{name}.py"
        path.write_text(MODULE.format(factor), encoding="utf-8")
        assert native_script(LOAD.format(name=name, path=str(path)) + REPORT, cache) == ["1", compiled]
        path.unlink()


SEEN = """
import os, warnings
seen = []
warnings.showwarning = lambda message, *place: seen.append(str(message))
"""
UNWRITABLE = """
step()
(warning,) = seen
assert os.environ["NUMBA_CACHE_DIR"] in warning
assert "set NUMBA_CACHE_DIR to a folder that can be written" in warning
"""


@pytest.mark.sample(0)
@needs_numba
def test_a_folder_that_cannot_be_made_is_replaced_by_a_temporary_one_with_one_warning(fresh_python, tmp_path):
    """Which the next process finds. Nothing of it is open to others."""
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    (tmp_path / "temporary").mkdir()
    script = tmp_path / "script.py"
    script.write_text(f"{SEEN}{STEP}{UNWRITABLE}{REPORT}", encoding="utf-8")
    folders = {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache")}
    folders |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(tmp_path / "temporary"))
    assert [fresh_python(script, **folders).split() for _ in range(2)] == [["1", "True"], ["1", "False"]]
    (folder,) = (tmp_path / "temporary").iterdir()
    assert {path.suffix for path in _kept(folder)} == {".nbc", ".nbi", ".py"}
    assert os.name == "nt" or folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "file").read_text(encoding="utf-8") == "not a folder"


@needs_numba
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users of POSIX")
def test_a_temporary_folder_that_others_can_write_to_is_not_used(monkeypatch, tmp_path):
    from tristep.kernels.backends.cpu import disk_cache

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").touch()
    open_to_all = tmp_path / "temporary" / f"tristep-{os.getuid()}"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    with pytest.warns(UserWarning, match="compiled code cannot be kept in"):
        folder = disk_cache.cache_folder()
    assert folder != open_to_all
    assert folder.stat().st_mode & 0o777 == 0o700


NOTE = """
from tristep.kernels.backends.cpu import disk_cache
disk_cache._SLOW = 0.01
step()
"""


@pytest.mark.sample(0)
@needs_numba
@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of POSIX")
@pytest.mark.parametrize("where", ["terminal", "file", "notebook"])
def test_a_slow_first_step_says_once_that_it_compiles(where, tmp_path):
    """To a terminal, or in a notebook as plain output, never as an error; a file of many ranks is left alone."""
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    in_notebook = "import builtins\nbuiltins.__IPYTHON__ = True\n" * (where == "notebook")
    script.write_text(in_notebook + STEP + NOTE, encoding="utf-8")
    there, here = os.openpty() if where == "terminal" else os.pipe()
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    ran = subprocess.run(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=here, text=True, check=True
    )
    os.write(here, b"end")
    said = ""
    while not said.endswith("end"):
        said += os.read(there, 10_000).decode()
    os.close(here)
    os.close(there)
    note = f"tristep: compiling for the CPU; later runs find the code in {cache}"
    assert said.split("\r\n") == [note, "end"] if where == "terminal" else said == "end"
    assert ran.stdout.splitlines().count(note) == (where == "notebook")
    assert "compiling" not in ran.stdout.replace(note, "")


READ_ONLY = """
import numba.core.caching

def refuse(self):
    raise PermissionError("read-only")

numba.core.caching._CacheLocator.ensure_cache_path = refuse
"""


@pytest.mark.sample(0)
@needs_numba
def test_folders_that_cannot_be_written_to_are_done_without(fresh_python, native_script, tmp_path):
    """As in a container that is read-only, also where the package itself lies. The second time, loops are there as text."""
    cache, script = tmp_path / "cache", tmp_path / "read_only.py"
    for _ in range(2):
        script.write_text(f"{READ_ONLY}{STEP}step()\n{REPORT}", encoding="utf-8")
        assert fresh_python(script, NUMBA_CACHE_DIR=str(cache)).split() == ["1", "True"]
        assert {path.suffix for path in _kept(cache)} == {".py"}


MESSAGES = """
from tristep.kernels import compress

def check(*names):
    values = torch.linspace(-1, 1, 3000)
    for name in names:
        found = []
        for engine in ("cpu", "eager"):
            code = compress.CODES[name]
            messages = torch.zeros(1, code.size(code.chunk(3000, 1)), dtype=torch.uint8)
            compress.encode(code, values, None, messages, 0.25, engine)
            read = torch.zeros(3000)
            compress.decode(code, messages, read, 0.25, engine)
            found += [messages, read]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]), name
"""


@pytest.mark.sample(0)
@needs_numba
def test_functions_of_one_name_that_two_processes_have_kept_are_told_apart(native_script, tmp_path):
    """Of 1, 2 and 4 bits, whose functions are one text, and have symbols of one number as each process starts again."""
    for names in (["1bit"], ["2bit"], ["int4"], ["1bit", "2bit", "int4"], ["int4", "2bit", "1bit"]):
        native_script(f"{MESSAGES}\ncheck(*{names})", tmp_path / "cache")


@needs_numba
def test_no_two_compiled_functions_have_one_name():
    from tristep.kernels.backends.cpu import low_precision
    from tristep.kernels.compress import cpu

    packing = [*low_precision.PACKING.values(), *cpu.PACKING.values()]
    functions = {id(each.py_func): each.py_func for each in itertools.chain(*packing)}
    assert len({(each.__module__, each.__qualname__) for each in functions.values()}) == len(functions) > 8


@pytest.mark.sample(0)
@needs_numba
def test_processes_may_write_the_same_code_at_once(native_script, tmp_path):
    """They are made to wait for each other just before the first step."""
    cache, script = tmp_path / "cache", tmp_path / "together.py"
    script.write_text(f"{STEP}print('ready', flush=True)\nsys.stdin.readline()\nstep()\n{REPORT}", encoding="utf-8")
    given = {"env": os.environ | {"NUMBA_CACHE_DIR": str(cache)}, "text": True}
    given |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    children = [subprocess.Popen([sys.executable, str(script)], **given) for _ in range(3)]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        results = [child.communicate(timeout=200) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert [(child.returncode, error) for child, (_, error) in zip(children, results, strict=True)] == [(0, "")] * 3
    assert not [path for path in _kept(cache) if path.suffix not in (".nbc", ".nbi", ".py")]
    assert native_script(f"step()\n{REPORT}", cache) == ["1", "False"]


@needs_numba
@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/tristep"),
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/tristep"),
        ("darwin", {}, "home/Library/Caches/tristep"),
        ("win32", {}, "home/AppData/Local/tristep"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/tristep"),
        ("linux", {"NUMBA_CACHE_DIR": "/numba", "XDG_CACHE_HOME": "/elsewhere"}, "/numba"),
    ],
)
def test_where_compiled_code_is_kept(monkeypatch, tmp_path, platform, variables, expected):
    from tristep.kernels.backends.cpu import disk_cache

    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert disk_cache.wanted_folder() == tmp_path / expected
