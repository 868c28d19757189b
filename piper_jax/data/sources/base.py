"""What a source of records is, and several as one; the interface is grain's for random access."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Protocol


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
