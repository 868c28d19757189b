"""From paths in a configuration to one source."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from piper_jax.config import DataSection
from piper_jax.data.skipping import Skipped
from piper_jax.data.sources.array_records import ArrayRecords
from piper_jax.data.sources.base import Joined, Source
from piper_jax.data.sources.json_lines import JsonLines
from piper_jax.data.sources.text_files import TextFiles
from piper_jax.errors import ConfigError, DataError

FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".array_record": "array_record", ".arrayrecord": "array_record"}
COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip"})
NOUN_OF_FORMAT = {"text": "file", "jsonl": "line"}


def open_source(paths: Sequence[Path], section: DataSection, skipped: Skipped) -> tuple[Source, str]:
    """The records of all files in order.

    Args:
      skipped: takes files that cannot be opened.

    Returns:
      ``(source, what a record is: "file", "line" or "record")``.

    Raises:
      DataError: a file that is damaged, unless it may be left out.
    """
    sources: list[Source] = []
    kinds: dict[str, None] = {}
    for kind, group in itertools.groupby(paths, lambda path: _format(path, section)):
        kinds[kind] = None
        if kind == "text":
            sources.append(TextFiles(list(group)))
            continue
        for path in group:
            opened = skipped.unless_corrupt(lambda path=path, kind=kind: _opened(path, kind, section))
            if opened is not None:
                sources.append(opened)
    nouns = {NOUN_OF_FORMAT.get(kind, "record") for kind in kinds}
    return Joined(sources), nouns.pop() if len(nouns) == 1 else "record"


def _format(path: Path, section: DataSection) -> str:
    if section.format == "auto" and path.suffix in COMPRESSED:
        raise ConfigError(
            f"data.paths: {path} is compressed.", help="decompress it; data.format=text takes its bytes as they are."
        )
    return section.format if section.format != "auto" else FORMAT_OF_SUFFIX.get(path.suffix, "text")


def _opened(path: Path, kind: str, section: DataSection) -> Source:
    if kind == "jsonl":
        return JsonLines(path, section.field)
    if kind == "array_record_json":
        return ArrayRecords(path, section.field)
    records = ArrayRecords(path, None)
    return ArrayRecords(path, section.field) if section.format == "auto" and _hold_objects(records) else records


def _hold_objects(records: Source) -> bool:
    """Whether the first record that can be read is a JSON object; the others then must be, with the key."""
    for index in range(len(records)):
        try:
            return isinstance(json.loads(records[index]), dict)
        except DataError:
            continue
        except ValueError:
            return False
    return False
