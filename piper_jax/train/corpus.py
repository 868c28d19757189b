"""The text to train on: files as bytes, divided into a training part and a held-out part. Imports no JAX."""

from __future__ import annotations

import glob
import math
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from piper_jax.config import DataSection
from piper_jax.errors import ConfigError, counted, suggest

Bytes = NDArray[np.uint8]

BLOCK_BYTES = 65_536
MIN_BLOCKS_PER_PART = 4
_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Bytes of all files in order, cut into blocks of which every so many-th is held out.

    Attributes:
      train, held_out: uint8 ``[bytes]``, disjoint parts of the text.
      num_files: read.
      origin: what was read, in words.
    """

    train: Bytes
    held_out: Bytes
    num_files: int
    origin: str

    def __str__(self) -> str:
        sizes = f"{len(self.train) / 1e6:.1f} MB to train on, {len(self.held_out) / 1e6:.1f} MB held out"
        return f"{self.origin}: {counted(self.num_files, 'file')}, {sizes}"


def load_corpus(section: DataSection, *, min_part_bytes: int = 1) -> Corpus:
    """Reads and divides the text; the same files give the same parts, whatever the seed.

    Args:
      min_part_bytes: that each part must have, such as one sequence and its targets.

    Raises:
      ConfigError: a path that matches nothing, a file that cannot be read, or too little text.
    """
    paths = _matched(section.paths) if section.paths else _standard_library()
    origin = ", ".join(section.paths) if section.paths else "Python's standard library"
    text = _read(paths, section.max_bytes)
    train, held_out = divided(text, section.held_out_fraction)
    shortest = min(len(train), len(held_out))
    if shortest < min_part_bytes:
        raise ConfigError(
            f"data: {len(text)} bytes of text leave a part of {shortest}, but {min_part_bytes} are needed.",
            help="name more files in data.paths, or lower train.sequence_length.",
        )
    return Corpus(train=train, held_out=held_out, num_files=len(paths), origin=origin)


def divided(text: Bytes, fraction: float) -> tuple[Bytes, Bytes]:
    """Training and held-out part: blocks of at most 64 KiB, held-out ones spread evenly over the text."""
    num_blocks = max(math.ceil(MIN_BLOCKS_PER_PART / fraction), len(text) // BLOCK_BYTES)
    blocks = np.array_split(text, num_blocks)
    held = [math.floor((k + 1) * fraction) > math.floor(k * fraction) for k in range(num_blocks)]
    parts = ([b for b, h in zip(blocks, held, strict=True) if h is want] for want in (False, True))
    train, held_out = (np.concatenate(part) if part else text[:0] for part in parts)
    return train, held_out


def unigram_entropy(text: Bytes) -> float:
    """Entropy of single bytes in nats: the loss of the best model that ignores what comes before."""
    counts = np.bincount(text, minlength=1)
    share = counts[counts > 0] / max(len(text), 1)
    return float(-(share * np.log(share)).sum())


def _standard_library() -> list[Path]:
    """The ``.py`` sources of the running Python, without installed packages and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not _NOT_SOURCES & set(path.relative_to(root).parts))
    return sorted(found)


def _matched(patterns: Iterable[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        if not matches:
            folder = Path(pattern).parent
            near = [str(path) for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
            fix = suggest(pattern, near[:20]) if near else f"there is no folder {folder}."
            raise ConfigError(f"data.paths: {pattern!r} matches no file.", help=fix)
        found.update(dict.fromkeys(matches))
    return list(found)


def _read(paths: Sequence[Path], max_bytes: int | None) -> Bytes:
    parts: list[bytes] = []
    room = max_bytes
    for path in paths:
        if room is not None and room <= 0:
            break
        try:
            with path.open("rb") as file:
                parts.append(file.read() if room is None else file.read(room))
        except OSError as error:
            raise ConfigError(
                f"data.paths: {path}: {error.strerror}.", help="make it readable, or leave it out."
            ) from None
        room = None if room is None else room - len(parts[-1])
    return np.frombuffer(b"".join(parts), np.uint8)
