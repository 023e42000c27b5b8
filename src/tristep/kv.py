"""Stores, under MXNet's short name for them: what `tristep.kvstore` offers."""

from typing import TYPE_CHECKING

from .trainer.kvstore import *

if not TYPE_CHECKING:  # mypy takes a list that is imported for an empty one
    from .trainer.kvstore import __all__ as __all__
