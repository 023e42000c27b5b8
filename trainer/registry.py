"""Registry: classes by name, behind every `@register` and every `create("name")`."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from ..kernels.messages import did_you_mean, listed
from . import contrib_names
from .validation import instance

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
        contrib: the kind of names in `tristep.contrib` that are further entries, such as "optimizers"; "" for none.
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
        contrib: str = "",
    ) -> None:
        super().__init__()
        self.kind = kind
        self.base = base
        self.argument = argument
        self.suffix = suffix
        self.hint = hint
        self.ignore_case = ignore_case
        self.contrib = contrib

    def register(self, entry: Entry, *names: str, stacklevel: int = 2) -> Entry:
        """Register and return a class or function, under its name, or `names` instead; works as a decorator.

        `stacklevel` is of the warning about a name that is taken; a wrapper around `register` adds 1.
        """
        self.check(entry)
        definition: Any = entry
        for name in names or (definition.__name__,):
            key = self._key(name)
            former = self.get(key) or self._in_contrib().get(key)
            if former is not None and _place(former) != _place(definition):
                warnings.warn(f"{self.kind} {key!r} now means {entry!r}, before {former!r}", stacklevel=stacklevel)
            self[key] = definition
        return entry

    def check(self, entry: Any) -> None:
        if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
            raise TypeError(f"@register takes a subclass of {self.base.__name__}, got {entry!r}")

    def lookup(self, name: str, argument: str | None = None) -> T:
        """Return the entry of a name, or raise an error that lists the registered names.

        `argument`: the name of the user's argument, for messages; None is the registry's.
        """
        argument = argument or self.argument
        instance(argument, name, str, f"the name of a registered {self.kind}, a string", shown=True)
        entry = self.find(name)
        if entry is not None:
            return entry
        names = self.names()
        meant = did_you_mean(self._key(name).removesuffix(self.suffix), names)
        hint = f" {self.hint}." if self.hint else ""
        raise ValueError(
            f"{argument}={name!r}: no {self.kind} is registered by that name.{meant}{hint} "
            f"There are {listed(map(repr, names)) or 'none'}"
        )

    def find(self, name: str) -> T | None:
        """Return the entry of a name, imported from `tristep.contrib` if need be; None if there is none."""
        key = self._key(name)
        for full_key in (key, key + self.suffix):
            if full_key in self:
                return self[full_key]
        entry = contrib_names.load(self.contrib, key) if self.contrib else None
        return None if entry is None else self.setdefault(key, entry)  # its module may have registered it

    def everything(self) -> dict[str, T]:
        """Return all entries, sorted by name; those of `tristep.contrib` are imported."""
        for name in self.names():
            self.find(name)
        return dict(sorted(self.items()))

    def name_of(self, klass: type) -> str:
        """Return the name of a class for files: its own if it is registered, else "module:qualified name"; see `named`."""
        found = self.find(klass.__name__)
        return klass.__name__ if found is not None and _place(found) == _place(klass) else _place(klass)

    def named(self, name: str, own: Any = None) -> T:
        """Return the class that a file names, by what `name_of` returned when it was written; the file is loaded into `own`.

        That is a registered class, or one that the program has defined or imported; apart from contrib, nothing is imported.
        Of classes with the same module and name, which a function may define, that of `own` comes first, then the newest.
        """
        entry: Any = self.find(name) if isinstance(name, str) and ":" not in name else None
        if entry is None:
            module, _, qualified = str(name).rpartition(":")
            defined = [each for each in _subclasses(self.base) if each.__qualname__ == qualified]
            defined = [each for each in defined if each.__module__ == module] or defined  # a script may be a module now
            if not defined and ":" not in str(name):
                return self.lookup(name)  # raises
            if len(places := sorted(set(map(_place, defined)))) != 1:
                several = f"{' and '.join(places)} have that name: write @register above the one that is meant"
                nothing = f"this {self.kind} is not registered: define or import its class before loading"
                raise ValueError(f"{self.argument}={name!r}: {several if places else nothing}")
            entry = defined[-1]
        kind: Any = type(own)
        return kind if _place(kind) == _place(entry) else entry

    def names(self) -> list[str]:
        """Return all names, with those of `tristep.contrib`, sorted and without the suffix; nothing is imported."""
        return sorted({key.removesuffix(self.suffix) for key in (*self, *self._in_contrib())})

    def _in_contrib(self) -> dict[str, str]:
        return contrib_names.places(self.contrib) if self.contrib else {}

    def _key(self, name: str) -> str:
        return name.lower() if self.ignore_case else name


def _subclasses(klass: Any) -> list[type]:
    """Return all subclasses of a class that there are, of those with the same base in the order of their definition."""
    return [each for child in klass.__subclasses__() for each in (child, *_subclasses(child))]


def _place(entry: Any) -> str:
    """Return "module:qualified name" of an entry, which `tristep.contrib` has as a string."""
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
