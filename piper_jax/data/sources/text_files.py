"""Text files: each is one record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piper_jax.data.sources.decoding import OR_SKIP
from piper_jax.errors import DataError


class TextFiles:
    """A record is the bytes of a whole file; what they encode is for the tokenizer to say."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = tuple(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        path = self._paths[index]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}.", help=f"make it readable, {OR_SKIP}") from None

    def place(self, index: int) -> str:
        return str(self._paths[index])
