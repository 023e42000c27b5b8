"""What a benchmark runs on: the machine, its versions and clock, and the machine code of the kernels."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import tristep


def machine(device: str) -> str:
    """One line about the machine and the versions."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, tristep {tristep.__version__}"
    if device == "cuda":
        import triton

        return f"{torch.cuda.get_device_name()}, {versions}, triton {triton.__version__}"
    import numba

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {torch.get_num_threads()} threads, {platform.system()}, {versions}, numba {numba.__version__}"


def conditions(device: str) -> dict[str, Any]:
    """Versions and the present SM clock, on which times on a GPU depend; {} on a CPU."""
    if device != "cuda":
        return {}
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "SM clock, MHz": sm_clock(),
    }


def commit() -> str | None:
    """The commit of the working tree, with "-dirty" where files differ from it; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def sm_clock() -> int | None:
    """The clock of the current GPU's SMs, in MHz, as nvidia-smi tells it; None where that is missing."""
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def code_hash(sass: str) -> str:
    """The SHA-256 of a kernel's machine code (SASS), which is equal where kernels are."""
    return hashlib.sha256(sass.encode()).hexdigest()


class Kernels:
    """Takes note of each kernel that Triton compiles, or finds in its cache, from now on; nothing on a CPU.

    Attributes:
        compiled: of each kernel its name, warps, and the hash of its machine code, in the order of their first launches.
    """

    def __init__(self, device: str) -> None:
        self.compiled: list[dict[str, Any]] = []
        if device == "cuda":
            import triton

            triton.knobs.compilation.listener = self._listen

    def _listen(self, *, metadata: dict[str, Any], metadata_group: dict[str, str], **others: Any) -> None:
        from triton.tools.disasm import get_sass

        files = [Path(path) for name, path in metadata_group.items() if name.endswith(".cubin")]
        code = {"sha256": code_hash(get_sass(files[0].read_bytes()))} if files else {}
        self.compiled.append({"kernel": metadata["name"], "warps": metadata["num_warps"], **code})


def program_of(elements: int, packed: bool) -> dict[str, int]:
    """How many elements a program of an update takes, and in how many blocks, where a launch has so many elements."""
    from tristep.kernels.backends.triton.compile import BLOCK, tile_for

    tile = tile_for(elements, packed)
    return {"tile": tile, "blocks of a program": tile // BLOCK}
