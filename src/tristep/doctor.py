"""`python -m tristep doctor`: versions, the engine of each device, the caches of compiled code, what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import tristep
from tristep.kernels import ENGINES, choose_engine
from tristep.kernels.backends import has_numba, has_triton

__all__ = ["report"]

_EXTRAS = {"notebook": "pictures and widgets", "demo": "the demo and the tutorials"}  # the extras for users
_REQUIREMENT = re.compile(r"([\w.-]+)([^;]*)(?:;(.*))?")


def report() -> tuple[list[str], bool]:
    """Return the lines of the report, and whether tristep can work here."""
    lines = [
        f"tristep {tristep.__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    ]
    wrong: list[str] = []
    lines += ["", "packages", *_packages(wrong)]
    lines += ["", "devices", *_devices(wrong)]
    lines += ["", "compiled code", *_caches()]
    lines += ["", *(wrong or ["Nothing is missing."])]
    return lines, not any(line.startswith("Error") for line in wrong)


def _packages(wrong: list[str]) -> Iterator[str]:
    """Yield a line for each package that tristep, or its extra `notebook` or `demo`, requires; add problems to `wrong`."""
    lacking: dict[str, list[str]] = {}
    for name, least, extra in _requirements():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacking.setdefault(extra, []).append(name)
            yield f"  {name:14} missing"
            continue
        is_old = _numbers(version) < _numbers(least)
        if is_old:
            wrong.append(f"Error: {name} {version} is too old: pip install -U '{name}>={least}'")
        yield f"  {name:14} {version}{f', older than {least}' if is_old else ''}"
    if has_triton():  # torch's builds for GPUs install it, from packages of several names
        import triton

        yield f"  {'triton':14} {triton.__version__}"
    else:
        yield f"  {'triton':14} missing, which only GPUs need"
    if required := lacking.get(""):
        wrong.append(f"Error: {', '.join(required)} missing: pip install {' '.join(required)}")
    for extra, purpose in _EXTRAS.items():
        if optional := lacking.get(extra):
            wrong.append(f"For {purpose}, {', '.join(optional)} missing: pip install 'tristep[{extra}]'")


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield name, least version and extra of each requirement of the installed package, without Triton."""
    try:
        requirements = importlib.metadata.requires("tristep") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        requirements = ["torch>=2.8", "numpy>=2.0.2", "numba>=0.61", "safetensors>=0.6.2", "packaging>=22", "tqdm>=4.66"]
        requirements += [f"{name}; extra == 'notebook'" for name in ("anywidget", "ipywidgets", "matplotlib")]
        requirements += ["scikit-learn; extra == 'demo'"]
    for text in requirements:
        name, versions, marker = (part or "" for part in _REQUIREMENT.fullmatch(text).groups())  # type: ignore[union-attr]
        extra = re.search(r"extra == ['\"](\w+)", marker)
        if name != "tristep" and (extra is None or extra[1] in _EXTRAS):
            least = re.search(r">=\s*([\d.]+)", versions)
            yield name, least[1] if least else "", extra[1] if extra else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]


def _devices(wrong: list[str]) -> Iterator[str]:
    """Yield a line for each device, with its engine and whether a step is right; add problems to `wrong`."""
    requested, used = os.environ.get("TRISTEP_ENGINE"), set()
    for device, name in _available():
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine = choose_engine(device)
        except (ValueError, ModuleNotFoundError, RuntimeError) as error:  # from TRISTEP_ENGINE
            wrong.append(f"Error: {error}")
            yield f"  {device!s:14} {name}: no engine"
            continue
        used.add(engine)
        wrong += [str(warning.message) for warning in caught]
        problem = _problem_of_a_step(device, engine)
        if problem:
            slower = [other for other in ENGINES[ENGINES.index(engine) + 1 :] if other != "cpu" or device.type == "cpu"]
            instead = f"; until it is mended, set TRISTEP_ENGINE={slower[-1]}" if slower else ""
            wrong.append(f"Error: a step on {device} by engine {engine!r} fails: {problem}{instead}")
        yield f"  {device!s:14} {name}: engine {engine!r}, a step {'fails' if problem else 'is right'}"
    if requested in ENGINES and used and requested not in used:
        wrong.append(f"Error: TRISTEP_ENGINE={requested!r} works on none of these devices: unset it")
    if not has_numba():
        wrong.append("Steps on the CPU are slow without numba: pip install numba")
    if not has_triton() and any(device.type in ("cuda", "xpu") for device, _ in _available()):
        wrong.append(
            "Steps on the GPU are slow without Triton, which torch's builds for GPUs bring: pip install 'tristep[triton]'"
        )


def _available() -> Iterator[tuple[torch.device, str]]:
    yield torch.device("cpu"), f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        what = "ROCm" if torch.version.hip else f"compute capability {major}.{minor}"
        yield torch.device("cuda", index), f"{torch.cuda.get_device_name(index)}, {what}"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            yield torch.device("xpu", index), torch.xpu.get_device_name(index)
    if torch.backends.mps.is_available():
        yield torch.device("mps"), "Apple's GPU"


def _problem_of_a_step(device: torch.device, engine: str) -> str:
    """Take a step of SGD, 1 - 0.5 * 0.25 for each weight, and return what is wrong with it; "" if it is right."""
    try:
        weight = torch.nn.Parameter(torch.ones(1000, device=device))
        trainer = tristep.Trainer([weight], "sgd", {"learning_rate": 0.5}, engine=engine)
        weight.grad = torch.full_like(weight, 0.25)
        trainer.step(1)
        values = sorted(set(weight.tolist()))
    except Exception as error:  # of any kind: the report shows it to the user
        return f"{type(error).__name__}: {error}"
    return "" if values == [0.875] else f"weights that should be 0.875 are {values[:3]}"


def _caches() -> Iterator[str]:
    """Yield a line for each cache of compiled code: its folder, its size, and whether it can be written."""
    if has_numba():
        from tristep.kernels.backends.cpu.disk_cache import cache_folder, wanted_folder

        folder, wanted = cache_folder(), wanted_folder()
        kept = "nowhere, so that every process compiles anew" if folder is None else _folder(folder)
        why = "" if folder == wanted else f"; {wanted} cannot be written: set NUMBA_CACHE_DIR to a folder that can"
        yield f"  {'for the CPU':14} {kept}{why}"
    if has_triton():
        from triton import knobs

        yield f"  {'for GPUs':14} {_folder(Path(knobs.cache.dir))}"


def _folder(path: Path) -> str:
    if not path.is_dir():
        return f"{path}, not there yet"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    kept = f"{path}, {size / 1e6:.1f} MB"
    return kept if os.access(path, os.W_OK) else f"{kept}, cannot be written, so that every process compiles anew"
