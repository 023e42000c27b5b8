"""Registry: classes by name, behind every `@register` and every `create("name")`."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from . import plugins
from .validation import did_you_mean

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(dict[str, T]):
    """Classes, or functions, by name; a dict, as MXNet's `Optimizer.opt_registry` is.

    A name that is registered twice means the later entry. This is silent for a new definition of the same class, one of the
    same module and qualified name, as when a notebook cell is run again; any other class replaces the first with a
    UserWarning, as in MXNet.

    Args:
        kind: what the entries are, for messages: "optimizer".
        base: the class that entries must be subclasses of; None means that they are not checked.
        argument: the argument that names an entry, for messages.
        suffix: an ending, in lower case, that a name may leave out when it is looked up.
        hint: a sentence for lookups of an unknown name.
        ignore_case: whether names are kept in lower case, and looked up in any.
        group: the entry points by which other packages add entries, such as "tristep.optimizers"; "" for none.
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
    ) -> None:
        super().__init__()
        self.kind = kind
        self.base = base
        self.argument = argument
        self.suffix = suffix
        self.hint = hint
        self.ignore_case = ignore_case
        self.group = group

    def register(self, entry: Entry, *names: str, stacklevel: int = 2) -> Entry:
        """Decorator: make a class known by its name, or by `names` instead.

        Args:
            entry: the class or function.
            names: what it is known by, instead of its own name.
            stacklevel: of the warning about a name that is taken; a function that calls this for its caller adds 1.

        Returns:
            `entry`, unchanged.

        Raises:
            TypeError: `entry` is not a subclass of the base class.
        """
        self.check(entry)
        definition: Any = entry
        for name in names or (definition.__name__,):
            key = self._key(name)
            known = self._known(key)
            if known is not None and _place(known) != _place(definition):
                warnings.warn(f"{self.kind} {key!r} now means {entry!r}, before {known!r}", stacklevel=stacklevel)
            self[key] = definition
        return entry

    def check(self, entry: Any) -> None:
        """Raise a TypeError unless `entry` is a subclass of the base class."""
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            raise TypeError(f"@register takes a subclass of {self.base.__name__}, got {entry!r}")

    def lookup(self, name: str, argument: str | None = None) -> T:
        """The entry of this name.

        Args:
            name: the name.
            argument: the argument that it was given as, for messages.

        Raises:
            TypeError: `name` is not a string.
            ValueError: no entry has that name; the message lists those there are, and the nearest.
        """
        argument = argument or self.argument
        if not isinstance(name, str):
            raise TypeError(
                f"{argument}={name!r}: must be the name of a registered {self.kind}, a string, not {type(name).__name__}"
            )
        entry = self.find(name)
        if entry is not None:
            return entry
        known, wrong = self.names(), self._key(name).removesuffix(self.suffix)
        raise ValueError(
            f"{argument}={name!r}: no {self.kind} is registered by that name; there are {', '.join(known) or 'none'}."
            f"{did_you_mean(wrong, known)} {self.hint}".rstrip()
        )

    def find(self, name: str) -> T | None:
        """The entry of this name, for which a plugin may have to be imported; None if there is none.

        Raises:
            ImportError, TypeError, ValueError: the plugin cannot be imported, or what it declares does not fit.
        """
        key = self._key(name)
        for each in (key, key + self.suffix):
            if each in self:
                return self[each]
        if not self.group or (entry := plugins.load(self.group, key)) is None:
            return None
        self.check(entry)
        return self.setdefault(key, entry)  # the plugin's module may have registered it

    def everything(self) -> dict[str, T]:
        """All entries in the order of their names, with the plugins', which are imported."""
        for name in self.names():
            self.find(name)
        return dict(sorted(self.items()))

    def names(self) -> list[str]:
        """The names in alphabetical order, with the plugins', without the suffix; nothing is imported."""
        declared = plugins.names(self.group) if self.group else ()
        return sorted({key.removesuffix(self.suffix) for key in (*self, *declared)})

    def _known(self, key: str) -> Any:
        """The entry of this key, or where `tristep.contrib` has it; None for a new key."""
        return self.get(key) or (plugins.in_contrib(self.group).get(key) if self.group else None)

    def _key(self, name: str) -> str:
        return name.lower() if self.ignore_case else name


def _place(entry: Any) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
