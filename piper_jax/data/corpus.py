"""The records to train on and those that are held out. Imports no JAX."""

from __future__ import annotations

import glob
import math
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from piper_jax.config import DataSection
from piper_jax.data.fingerprint import fingerprint
from piper_jax.data.skipping import Skipped
from piper_jax.data.sources import Source, open_source
from piper_jax.errors import ConfigError, suggest

Bytes = NDArray[np.uint8]

BLOCK_BYTES = 65_536
MIN_BLOCKS_PER_PART = 4
UTF8_MAX_BYTES = 4
_NOT_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What the paths of a configuration name.

    Attributes:
      source: the records of ``data.paths``.
      held_out: those of ``data.held_out_paths``; None where a fraction of ``source`` is held out.
      skipped: what was left out, now and later.
      noun: what a record is, in words.
      of_files: a record is a whole text file.
      origin: what was named, in words.
      digest: of the files of ``source``.
    """

    source: Source
    held_out: Source | None
    skipped: Skipped
    noun: str
    of_files: bool
    origin: str
    digest: str


def open_corpus(section: DataSection) -> Corpus:
    """Finds the records; text files are not read yet.

    Raises:
      ConfigError: a path that matches nothing.
      DataError: a damaged file, unless it may be left out.
    """
    skipped = Skipped(limit=section.max_corrupt if section.on_corrupt == "skip" else 0)
    paths = _matched(section.paths, "data.paths") if section.paths else _standard_library()
    source, noun = open_source(paths, section, skipped)
    held_out = None
    if section.held_out_paths:
        held_out, _ = open_source(_matched(section.held_out_paths, "data.held_out_paths"), section, skipped)
    origin = ", ".join(section.paths) if section.paths else "Python's standard library"
    return Corpus(
        source=source, held_out=held_out, skipped=skipped, noun=noun, of_files=noun == "file", origin=origin,
        digest=fingerprint(paths),
    )  # fmt: skip


def divided(text: Bytes, fraction: float) -> tuple[Bytes, Bytes]:
    """Training and held-out part: blocks of at most 64 KiB, held-out ones spread evenly over the text.

    A block does not begin within a character of UTF-8.
    """
    num_blocks = max(math.ceil(MIN_BLOCKS_PER_PART / fraction), len(text) // BLOCK_BYTES)
    cuts = [character_start(text, len(text) * k // num_blocks) for k in range(1, num_blocks)]
    blocks, held = np.split(text, cuts), held_out_indices(num_blocks, fraction)
    parts = ([b for k, b in enumerate(blocks) if (k in held) is want] for want in (False, True))
    train, held_out = (np.concatenate(part) if part else text[:0] for part in parts)
    return train, held_out


def held_out_indices(count: int, fraction: float) -> frozenset[int]:
    """Every so many-th of ``count`` things, spread evenly."""
    return frozenset(k for k in range(count) if math.floor((k + 1) * fraction) > math.floor(k * fraction))


def character_start(text: Bytes, cut: int) -> int:
    """The first place from ``cut`` on that may begin a character."""
    near = text[cut : cut + UTF8_MAX_BYTES - 1]
    return cut + int(np.logical_and.accumulate(near & 0xC0 == 0x80).sum())


def unigram_entropy(tokens: NDArray[np.integer]) -> float:
    """Entropy of single tokens in nats: the loss of the best model that ignores what comes before."""
    counts = np.bincount(tokens, minlength=1)
    share = counts[counts > 0] / max(len(tokens), 1)
    return float(-(share * np.log(share)).sum())


def _standard_library() -> list[Path]:
    """The ``.py`` sources of the running Python, without installed packages and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not _NOT_SOURCES & set(path.relative_to(root).parts))
    return sorted(found)


def _matched(patterns: Iterable[str], key: str) -> list[Path]:
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        if not matches:
            folder = Path(pattern).parent
            near = [str(path) for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
            fix = suggest(pattern, near[:20]) if near else f"there is no folder {folder}."
            raise ConfigError(f"{key}: {pattern!r} matches no file.", help=fix)
        found.update(dict.fromkeys(matches))
    return list(found)
