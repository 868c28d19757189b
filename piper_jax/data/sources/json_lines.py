"""JSONL: each line is an object with the text under one key; lines of white space are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from piper_jax.data.sources.decoding import text_of_json
from piper_jax.errors import DataError


class JsonLines:
    """A record is a line. Opening reads the file once, to find where its lines begin."""

    def __init__(self, path: Path, field: str):
        self._path, self._field = path, field
        starts: list[int] = []
        numbers: list[int] = []
        begin = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.isspace():
                        starts.append(begin)
                        numbers.append(number)
                    begin += len(line)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}.", help="make it readable, or leave it out.") from None
        self._starts, self._numbers = np.array(starts, np.int64), np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(int(self._starts[index]))
                line = file.readline().rstrip(b"\r\n")
        except OSError as error:
            raise DataError(f"{self.place(index)}: {error.strerror or error}.", help="make it readable.") from None
        return text_of_json(line, self._field, self.place(index))

    def place(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"
