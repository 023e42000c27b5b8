"""Second names of modules, such as `tristep.optimizer` for `tristep.trainer.optimizer`."""

import sys
from types import ModuleType


def also_import_as(name: str, module: ModuleType) -> None:
    """Give a package a second name, and its submodules too, which would otherwise be executed a second time under it."""
    sys.modules[name] = module
    for full_name, submodule in list(sys.modules.items()):
        if full_name.startswith(f"{module.__name__}."):
            sys.modules[name + full_name.removeprefix(module.__name__)] = submodule
