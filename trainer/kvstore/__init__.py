"""Stores: where the copies of a model meet. Values by key, which add up what is pushed to them and may update themselves.

Names and semantics are those of MXNet's kvstore; `create` makes one by its name.
"""

from .base import KVStore, create, register, registered
from .local import LocalStore

__all__ = ["KVStore", "LocalStore", "create", "register", "registered"]
