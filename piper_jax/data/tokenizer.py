"""From text to tokens: what a tokenizer is, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from piper_jax.config import DataSection
from piper_jax.config.vocabulary import NUM_BYTES

Tokens = NDArray[np.int32]


class Tokenizer(Protocol):
    """Encodes UTF-8 text.

    Attributes:
      size: all tokens are below it, ``end`` included.
      end: the token after the last one of a document.
      digest: of the whole tokenizer; equal ones encode alike.
      unit: what a token is, in words.
    """

    @property
    def size(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def unit(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each text, without ``end``.

        Raises:
          UnicodeDecodeError: a text is no UTF-8, and the tokenizer has need of it.
        """
        ...


class ByteTokenizer:
    """Each byte is a token; one more ends a document."""

    size, end, digest, unit = NUM_BYTES + 1, NUM_BYTES, "bytes", "byte"

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]


def open_tokenizer(section: DataSection, texts: Callable[[], Iterable[bytes]], folder: Path | None) -> Tokenizer:
    """The tokenizer of a configuration.

    Args:
      texts: gives the training part, to train a tokenizer on if need be.
      folder: of the run; a trained tokenizer is kept there and found again. None keeps nothing.

    Raises:
      ConfigError: a file that cannot be read, or is no tokenizer.
    """
    if section.tokenizer.kind == "bytes":
        return ByteTokenizer()
    from piper_jax.data.byte_pairs import open_byte_pairs

    return open_byte_pairs(section.tokenizer, texts, folder)
