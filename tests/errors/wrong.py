"""Values of many types, and the one thing that may come of giving them to a public function: a PiperError."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import piper_jax as piper
from piper_jax.errors import MAX_LINES

VALUES: tuple[object, ...] = (
    *(None, True, 3, -1, 2.5, float("nan"), "x", "", b"x", ..., object(), int, lambda: 0),
    *((), (None,), ((1.5,),), [], [1], ["x"], {}, {"a": 1}, set(), range(2)),
    *(piper.where(), piper.directive("1F1B"), piper.Strategy()),
)


def raw_errors(call: Callable[[object], object], values: Iterable[object] = VALUES) -> list[str]:
    """What is neither taken by ``call`` nor refused by a PiperError of a few lines."""
    raw: list[str] = []
    for value in values:
        try:
            call(value)
        except piper.PiperError as error:
            if len(str(error).splitlines()) > MAX_LINES:
                raw.append(f"{value!r}: {error}")
        except Exception as error:
            raw.append(f"{value!r}: {type(error).__name__}: {error}")
    return raw
