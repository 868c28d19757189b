"""What a source of records is, and several as one; the interface is grain's for random access."""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from typing import Any, Protocol, cast

from piper_jax.errors import DataError, suggest


class Source(Protocol):
    """Records of UTF-8 text, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes:
        """The text of a record.

        Raises:
          DataError: it cannot be read, with its place and the fix.
        """
        ...

    def place(self, index: int) -> str:
        """Where a record is, such as ``corpus.jsonl:12``."""
        ...


class Joined:
    """The records of several sources, one source after the other."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = tuple(sources)
        self._ends = list(itertools.accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        source, within = self._found(index)
        return source[within]

    def place(self, index: int) -> str:
        source, within = self._found(index)
        return source.place(within)

    def _found(self, index: int) -> tuple[Source, int]:
        which = bisect.bisect_right(self._ends, index)
        return self._sources[which], index - (self._ends[which - 1] if which else 0)


class Chosen:
    """Some records of a source, in the order of their numbers."""

    def __init__(self, source: Source, indices: Sequence[int]):
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> bytes:
        return self._source[self._indices[index]]

    def place(self, index: int) -> str:
        return self._source.place(self._indices[index])


def text_of_json(record: bytes, field: str, place: str) -> bytes:
    """The text under a key of a JSON object.

    Raises:
      DataError: it is not UTF-8, not JSON, no object, or the key is missing or holds no text.
    """
    try:
        values: Any = json.loads(record.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(place, error) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not JSON: {error.msg} at column {error.colno}.", help=f"mend the record, {OR_SKIP}"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{place}: a JSON {type(values).__name__}, no object.", help=f"mend the record, {OR_SKIP}")
    found = cast(dict[str, Any], values)
    if field not in found:
        near = suggest(field, found) if found else "it has no keys."
        raise DataError(f"{place}: the record has no key {field!r}.", help=f"set data.field; {near}")
    if not isinstance(text := found[field], str):
        raise DataError(
            f"{place}: {field!r} is a {type(text).__name__}, no text.",
            help=f"mend the record or set data.field, {OR_SKIP}",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {field!r} holds half a surrogate pair at character {error.start}.",
            help=f"mend the record, {OR_SKIP}",
        ) from None


OR_SKIP = "or leave such records out with data.on_corrupt=skip."


def not_utf8(place: str, error: UnicodeDecodeError) -> DataError:
    """The fault of a record that is no UTF-8 text."""
    return DataError(f"{place}: not UTF-8 text at byte {error.start}.", help=f"convert the file to UTF-8, {OR_SKIP}")
