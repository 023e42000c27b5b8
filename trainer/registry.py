"""Registry: classes by name, behind every `@register` and every `create("name")`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from . import plugins
from .validation import did_you_mean

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(dict[str, T]):
    """A dict of classes or functions by name, with a `register` decorator, like MXNet's `Optimizer.opt_registry`.

    If a name is registered twice, the later entry replaces the first: silently if both have the same module and qualified
    name, as when a notebook cell is run again; otherwise with a UserWarning, as in MXNet.

    Args:
        kind: the noun for an entry in messages, such as "optimizer".
        base: the class that entries must be subclasses of; None: entries are not checked.
        argument: the name of the argument that names an entry, for messages.
        suffix: a lower-case ending that a lookup may omit.
        hint: a sentence for the error message of an unknown name.
        ignore_case: whether names are stored in lower case, and looked up in any case.
        group: the group of entry points with which other packages add entries, such as "tristep.optimizers"; "" for none.
        own_name: a function that returns the name that the entry point of a class must have; None allows any name.
    """

    def __init__(
        self,
        kind: str,
        base: type | None = None,
        *,
        argument: str = "name",
        suffix: str = "",
        hint: str = "",
        ignore_case: bool = True,
        group: str = "",
        own_name: Callable[[Any], str] | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.base = base
        self.argument = argument
        self.suffix = suffix
        self.hint = hint
        self.ignore_case = ignore_case
        self.group = group
        self.own_name = own_name

    def register(self, entry: Entry, *names: str, stacklevel: int = 2) -> Entry:
        """Register a class or function by its name, or by `names`; works as a decorator.

        Args:
            entry: the class or function.
            names: the names to register, instead of the entry's own.
            stacklevel: the `stacklevel` of the warning about a name that is taken; a wrapper around `register` adds 1.

        Returns:
            `entry`, unchanged.

        Raises:
            TypeError: `entry` is not a subclass of the base class.
        """
        self.check(entry)
        definition: Any = entry
        for name in names or (definition.__name__,):
            key = self._key(name)
            former = self.get(key) or (plugins.in_contrib(self.group).get(key) if self.group else None)
            if former is not None and _place(former) != _place(definition):
                warnings.warn(f"{self.kind} {key!r} now means {entry!r}, before {former!r}", stacklevel=stacklevel)
            self[key] = definition
        return entry

    def check(self, entry: Any) -> None:
        """Raise a TypeError unless `entry` is a subclass of the base class."""
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            raise TypeError(f"@register takes a subclass of {self.base.__name__}, got {entry!r}")

    def lookup(self, name: str, argument: str | None = None) -> T:
        """Return the entry of a name, or raise an error that lists the registered names.

        Args:
            name: the name.
            argument: the name of the user's argument, for messages; None is the registry's.

        Raises:
            TypeError: `name` is not a string.
            ValueError: no entry has that name.
            ImportError: the plugin with that name cannot be imported.
        """
        argument = argument or self.argument
        if not isinstance(name, str):
            raise TypeError(
                f"{argument}={name!r}: must be the name of a registered {self.kind}, a string, not {type(name).__name__}"
            )
        entry = self.find(name)
        if entry is not None:
            return entry
        names = self.names()
        raise ValueError(
            f"{argument}={name!r}: no {self.kind} is registered by that name; there are {', '.join(names) or 'none'}."
            f"{did_you_mean(self._key(name).removesuffix(self.suffix), names)} {self.hint}".rstrip()
        )

    def find(self, name: str) -> T | None:
        """Return the entry of a name, imported from a plugin if need be; None if there is none.

        Raises:
            ImportError: the plugin cannot be imported.
            TypeError: the plugin's object is not a subclass of the base class.
            ValueError: several plugins declare the name, or the plugin's class has another name.
        """
        key = self._key(name)
        for full_key in (key, key + self.suffix):
            if full_key in self:
                return self[full_key]
        if not self.group:
            return None
        declared = name if name in plugins.names(self.group) else key
        if self.own_name is None and self.ignore_case:  # of a class with a name of its own more is known below
            for other in plugins.names(self.group):
                if other != key and other.lower() == key:
                    raise ValueError(f"{other!r} in the entry points {self.group!r}: the name must be in lower case")
        if (entry := plugins.load(self.group, declared)) is None:
            return None
        where = f"{declared!r} in the entry points {self.group!r}"
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            raise TypeError(f"{where} is {entry!r}: it must be a subclass of {self.base.__name__}")
        if self.own_name is not None and (own_name := self.own_name(entry)) != declared:
            raise ValueError(f"{where} is {entry!r}: the entry point must have its name, {own_name!r}")
        return self.setdefault(key, entry)  # the plugin's module may have registered it

    def everything(self) -> dict[str, T]:
        """Import all plugins, and return all entries, sorted by name."""
        for name in self.names():
            self.find(name)
        return dict(sorted(self.items()))

    def names(self) -> list[str]:
        """Return all names, with those of plugins, sorted and without the suffix; nothing is imported."""
        declared = plugins.names(self.group) if self.group else ()
        return sorted({key.removesuffix(self.suffix) for key in (*self, *declared)})

    def _key(self, name: str) -> str:
        return name.lower() if self.ignore_case else name


def _place(entry: Any) -> str:
    """Return "module:qualified name" of an entry, which `tristep.contrib` has as a string."""
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
