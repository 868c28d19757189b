"""ArrayRecord files: each record is text, or a JSON object with the text under one key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piper_jax.data.sources.decoding import OR_SKIP, text_of_json
from piper_jax.errors import DataError

REASON_CHARACTERS = 160


class ArrayRecords:
    """A record of the file is a record of text; checksums of the format find what was damaged."""

    def __init__(self, path: Path, field: str | None):
        """Opens a file.

        Args:
          field: the key of the text; None means that records are the text.
        """
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        self._path, self._field = path, field
        try:
            self._records: Any = ArrayRecordDataSource([str(path)])
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(
                f"{path}: no whole ArrayRecord file{_reason(error)}.", help=f"write or copy the file again, {OR_SKIP}"
            ) from None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> bytes:
        try:
            record = bytes(self._records[index])
        except (OSError, RuntimeError, ValueError, IndexError) as error:
            raise DataError(
                f"{self.place(index)}: the record is damaged{_reason(error)}.",
                help=f"write or copy the file again, {OR_SKIP}",
            ) from None
        return record if self._field is None else text_of_json(record, self._field, self.place(index))

    def place(self, index: int) -> str:
        return f"{self._path}: record {index}"


def _reason(error: Exception) -> str:
    """The library's own words, the first line of them."""
    text = str(error).partition("\n")[0].partition(";")[0].strip().rstrip(".")
    return f": {text[:REASON_CHARACTERS]}" if text else ""
