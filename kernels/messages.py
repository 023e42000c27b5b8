"""Messages of refusals: which names are like an unknown one, then which there are; and what came in place of a type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def did_you_mean(name: Any, allowed: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """Return " Did you mean ...?" with the allowed names most like `name`; "" if none is similar.

    `other_names`: the allowed ones by other libraries' names for them.
    """
    meant = other_names.get(name) if other_names else None
    near = [meant] if meant else difflib.get_close_matches(str(name), list(allowed), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def listed(texts: Iterable[str], most: int = 10) -> str:
    """Join texts by commas, at most `most` of them; then how many more there are."""
    texts = list(texts)
    omitted = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {omitted} more" if omitted > 0 else "")


def there_are(name: Any, allowed: Iterable[str], hint: str = "") -> str:
    """Return " Did you mean 'a'? There are 'a', 'b' and 23 more", to follow on a sentence that refuses `name`.

    `hint`: what to write instead, in place of the question.
    """
    allowed = list(allowed)
    hint = f" {hint}" if hint else did_you_mean(name, allowed)
    return f"{hint} There are {listed(map(repr, allowed)) or 'none'}"


def one_of(name: Any, allowed: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """Return " must be one of 'a', 'b' and 23 more", or " Did you mean 'a'? It must be ...", to follow on a colon."""
    allowed = list(allowed)
    hint = did_you_mean(name, allowed, other_names)
    return f"{f'{hint} It' if hint else ''} must be one of {listed(map(repr, allowed))}"


def instance(name: str, value: Any, kinds: Any, allowed: str, hint: str = "", *, shown: bool = False) -> None:
    """Raise TypeError unless `value` is an instance of `kinds`, which the message calls `allowed`.

    `hint`: what to do, after the message. `shown`: whether the message has the value, which should print in a few words.
    """
    if not isinstance(value, kinds):
        came = type(value).__name__
        what = f"{name}={value!r:.200}: must be {allowed}, not {came}" if shown else f"{name} must be {allowed}, got {came}"
        raise TypeError(f"{what}{hint}")
