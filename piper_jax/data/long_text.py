"""``packing: none``: all records as one long text, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from piper_jax.config import Config
from piper_jax.data.batches import Batch
from piper_jax.data.corpus import BLOCK_BYTES, UTF8_MAX_BYTES, Bytes, Corpus, character_start, divided
from piper_jax.data.order import ShuffledEpochs
from piper_jax.data.sources import Source
from piper_jax.data.sources.decoding import not_utf8
from piper_jax.data.tokenizer import Tokenizer, open_tokenizer
from piper_jax.data.windows import ShuffledWindows, Text, held_out_windows, num_windows
from piper_jax.errors import ConfigError, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class LongText:
    """A training part and a held-out part, as tokens.

    Attributes:
      num_records: read.
      num_bytes: of the two parts.
    """

    config: Config
    corpus: Corpus
    tokenizer: Tokenizer
    train: Text
    held_out: Text
    num_records: int
    num_bytes: tuple[int, int]

    def training(self, rows: Sequence[int] | None = None) -> ShuffledWindows:
        """The batches to train on, from the first one.

        Args:
          rows: of each batch, that are wanted; None means all.
        """
        sizes = self.config.train
        num_records = num_windows(self.train, sizes.sequence_length)
        identity = {
            "packing": "none",
            "files": self.corpus.digest,
            "records": num_records,
            "sequence_length": sizes.sequence_length,
            "seed": sizes.seed,
            "tokenizer": self.tokenizer.digest,
        }
        return ShuffledWindows(
            text=self.train,
            batch_size=sizes.batch_size,
            sequence_length=sizes.sequence_length,
            order=ShuffledEpochs(size=num_records, seed=sizes.seed),
            identity=identity,
            rows=None if rows is None or len(rows) == sizes.batch_size else rows,
        )

    def held_out_batches(self) -> list[Batch]:
        """The same batches every time."""
        sizes = self.config.train
        return held_out_windows(
            self.held_out,
            num_batches=self.config.evaluation.num_batches,
            batch_size=sizes.batch_size,
            sequence_length=sizes.sequence_length,
        )

    def __str__(self) -> str:
        train, held_out = (f"{size / 1e6:.1f} MB" for size in self.num_bytes)
        tokens = "" if self.tokenizer.unit == "byte" else f" ({len(self.train) / 1e6:.1f} M tokens)"
        records = counted(self.num_records, self.corpus.noun)
        return f"{self.corpus.origin}: {records}, {train}{tokens} to train on, {held_out} held out"


def read_long_text(config: Config, corpus: Corpus, folder: Path | None) -> LongText:
    """Reads, divides and encodes everything; the same files give the same parts, whatever the seed.

    Raises:
      ConfigError: too little text.
      DataError: a record that cannot be read, unless it may be left out.
    """
    section, needed = config.data, config.train.sequence_length + 2
    text, num_records = _read(corpus.source, corpus, config)
    if corpus.held_out is None:
        train, held_out = divided(text, section.held_out_fraction)
    else:
        train, held_out = text, _read(corpus.held_out, corpus, config)[0]
    tokenizer = open_tokenizer(section, lambda: _blocks(train), folder)
    parts = [_encoded(part, tokenizer) for part in (train, held_out)]
    if (shortest := min(map(len, parts))) < needed:
        raise ConfigError(
            f"data: {len(text)} bytes of text leave a part of {shortest} {tokenizer.unit}s, but {needed} are needed.",
            help="name more files in data.paths, or lower train.sequence_length.",
        )
    return LongText(
        config=config,
        corpus=corpus,
        tokenizer=tokenizer,
        train=parts[0],
        held_out=parts[1],
        num_records=num_records,
        num_bytes=(len(train), len(held_out)),
    )


def _read(source: Source, corpus: Corpus, config: Config) -> tuple[Bytes, int]:
    """The text of all records, one after the other; those of JSONL and ArrayRecord end with a line break."""
    section, parts = config.data, list[bytes]()
    room = section.max_bytes
    for index in range(len(source)):
        if room is not None and room <= 0:
            break
        if (record := corpus.skipped.unless_corrupt(lambda index=index: _record(source, index, config))) is None:
            continue
        parts.append(_up_to(record if corpus.of_files else record + b"\n", room))
        room = None if room is None else room - len(record)
    return np.frombuffer(b"".join(parts), np.uint8), len(parts)


def _up_to(record: bytes, room: int | None) -> bytes:
    """The beginning of a record, which does not end within a character."""
    if room is None or room >= len(record):
        return record
    whole = next((end for end in range(room, max(room - UTF8_MAX_BYTES, 0), -1) if record[end] & 0xC0 != 0x80), room)
    return record[:whole]


def _record(source: Source, index: int, config: Config) -> bytes:
    record = source[index]
    if config.data.tokenizer.kind != "bytes":
        try:
            record.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(source.place(index), error) from None
    return record


def _encoded(text: Bytes, tokenizer: Tokenizer) -> Text:
    if tokenizer.unit == "byte":
        return text
    return np.concatenate([np.zeros(0, np.int32), *tokenizer.encode(list(_blocks(text)))])


def _blocks(text: Bytes) -> Iterator[bytes]:
    """The text in pieces that are encoded one by one, none of which begins within a character."""
    begin = 0
    while begin < len(text):
        end = character_start(text, begin + BLOCK_BYTES)
        yield text[begin:end].tobytes()
        begin = end
