"""NVIDIA's driver library without a GPU: Triton's own launchers load kernels into it and launch them, and it takes notes.

With it and simulated_gpus.py the triton engine runs in Triton's real driver, as on a machine with one kind of GPU, up to the
call that would start a kernel. Nothing is computed. For a process of its own: it stays loaded.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

__all__ = ["RecordingLibcuda"]

# The functions that Triton 3.5 to 3.9 look for; attributes have their numbers of CUDA's documentation of the driver.
SOURCE = r"""
#include <stdint.h>
#include <string.h>
typedef int R; typedef void *P;
static char names[256][256], launched[65536][256];
static int n_names, n_launched;
R cuInit(unsigned f) { return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuGetErrorString(R e, const char **s) { *s = "recorded error"; return 0; }
R cuDeviceGetCount(int *n) { *n = 1; return 0; }
R cuDeviceGet(int *d, int n) { *d = n; return 0; }
R cuDeviceGetAttribute(int *v, int what, int d) {
  *v = what == 75 ? 9 : what == 76 ? 0 : what == 97 ? 232448 : what == 81 ? 233472 : what == 10 ? 32
     : what == 16 ? 132 : what == 12 ? 65536 : 1;
  return 0;
}
R cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)1; return 0; }
R cuCtxGetCurrent(P *c) { *c = (P)1; return 0; }
R cuCtxSetCurrent(P c) { return 0; }
R cuCtxGetDevice(int *d) { *d = 0; return 0; }
R cuCtxGetLimit(size_t *v, int l) { *v = 0; return 0; }
R cuCtxSetLimit(int l, size_t v) { return 0; }
R cuModuleLoadData(P *m, const void *image) { *m = (P)1; return memcmp(image, "\177ELF", 4) ? 200 : 0; }
R cuModuleUnload(P m) { return 0; }
R cuModuleGetFunction(P *f, P m, const char *name) {
  strncpy(names[n_names], name, 255);
  *f = names[n_names++ % 256];
  return 0;
}
R cuFuncGetAttribute(int *v, int what, P f) { *v = what == 0 ? 1024 : what == 4 ? 32 : 0; return 0; }
R cuFuncSetAttribute(P f, int what, int v) { return 0; }
R cuFuncSetCacheConfig(P f, int c) { return 0; }
R cuPointerGetAttribute(void *v, int what, uint64_t p) { *(uint64_t *)v = p; return 0; }
R cuPointerGetAttributes(unsigned n, int *what, void **v, uint64_t p) {
  for (unsigned i = 0; i < n; i++) *(uint64_t *)v[i] = p;
  return 0;
}
R cuStreamIsCapturing(P s, int *v) { *v = 0; return 0; }
R cuOccupancyMaxActiveClusters(int *n, P f, const void *c) { *n = 1; return 0; }
R cuTensorMapEncodeTiled() { return 0; }
R cuTensorMapEncodeIm2col() { return 0; }
R cuLaunchKernelEx(const void *c, P f, void **a, void **e) {
  strncpy(launched[n_launched++ % 65536], (char *)f, 255);
  return 0;
}
int recorded_launches(void) { return n_launched; }
const char *recorded_launch(int k) { return launched[k]; }
"""


class RecordingLibcuda:
    """The library, built with the C compiler of this machine and loaded.

    Args:
        folder: where it is built; the environment variable TRITON_LIBCUDA_PATH names it then.
    """

    def __init__(self, folder: Path) -> None:
        source, library = folder / "recording.c", folder / "libcuda.so.1"
        source.write_text(SOURCE, encoding="utf-8")
        command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, source]
        subprocess.run(command, check=True)
        (folder / "libcuda.so").symlink_to(library)  # by this name Triton 3.5 links with it
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self._library.recorded_launch.restype = ctypes.c_char_p

    def launches(self) -> list[str]:
        """Names of the kernels that have been launched, in order."""
        return [self._library.recorded_launch(k).decode() for k in range(self._library.recorded_launches())]
