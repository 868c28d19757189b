"""How the program that a plan was made for differs from another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

Structure = Mapping[str, tuple[str, ...]]
"""A traced program as text: by kind (parameter, operation, update, ...), one line for each."""


def differences(saved: Structure, given: Structure) -> Iterator[str]:
    """For each kind the first line that differs, as it was saved and as it is given."""
    if not saved:
        yield "the file does not say what it looked like"
        return
    for kind in given:
        before, now = saved.get(kind, ()), given[kind]
        pairs = enumerate(zip_longest(before, now))
        number, (old, new) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, ("", "")))
        if old != new:
            yield f"{kind} {number} of {len(now)}" + (f", {len(before)} when saved" if len(before) != len(now) else "")
            yield f"  saved: {old or 'none'}"
            yield f"  given: {new or 'none'}"
