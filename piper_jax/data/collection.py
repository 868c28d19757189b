"""``packing: documents``: records that stay apart, read and encoded ahead of their use by grain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from piper_jax.config import Config
from piper_jax.data.batches import Batch
from piper_jax.data.corpus import Corpus, held_out_indices
from piper_jax.data.documents import PackedDocuments, held_out_documents
from piper_jax.data.order import ShuffledEpochs
from piper_jax.data.sources import Source
from piper_jax.data.sources.base import Chosen
from piper_jax.data.sources.decoding import not_utf8
from piper_jax.data.tokenizer import Tokenizer, Tokens, open_tokenizer
from piper_jax.errors import ConfigError, DataError, counted

READ_THREADS = 4
READ_AHEAD = 64
EVALUATION_SEED = 0
NO_END = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Records to train on, and records that are held out."""

    config: Config
    corpus: Corpus
    tokenizer: Tokenizer
    train: Source
    held_out: Source

    def training(self, rows: Sequence[int] | None = None) -> PackedDocuments:
        """The batches to train on, from the first one; all rows of each are made, whichever are wanted."""
        sizes = self.config.train
        identity = {
            "packing": "documents",
            "files": self.corpus.digest,
            "records": len(self.train),
            "seed": sizes.seed,
            "tokenizer": self.tokenizer.digest,
        }
        return PackedDocuments(
            documents=self,
            num_records=len(self.train),
            batch_size=sizes.batch_size,
            sequence_length=sizes.sequence_length,
            identity=identity,
            skipped=self.corpus.skipped,
        )

    def held_out_batches(self) -> list[Batch]:
        """The same batches every time, of records in an order of their own."""
        sizes, count = self.config.train, len(self.held_out)
        order = ShuffledEpochs(size=count, seed=EVALUATION_SEED)
        batches = held_out_documents(
            (self._document(self.held_out, order(k)) for k in range(count)),
            num_batches=self.config.evaluation.num_batches,
            batch_size=sizes.batch_size,
            sequence_length=sizes.sequence_length,
            skipped=self.corpus.skipped,
        )
        if not batches:
            raise DataError(
                f"data: nothing is held out, since none of {counted(count, self.corpus.noun)} has any text.",
                help="give data.held_out_paths, or raise data.held_out_fraction.",
            )
        return batches

    def at(self, position: int) -> Tokens | DataError:
        """The document to train on at a position of the run."""
        order = ShuffledEpochs(size=len(self.train), seed=self.config.train.seed)
        return self._document(self.train, order(position))

    def since(self, position: int) -> Iterator[Tokens | DataError]:
        """The documents to train on from a position on; threads read and encode the next ones ahead."""
        import grain

        positions: Any = grain.MapDataset.range(position, NO_END)
        documents = positions.map(self.at)
        options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=READ_AHEAD)
        return iter(documents.to_iter_dataset(options))

    def _document(self, source: Source, index: int) -> Tokens | DataError:
        """A record with the token that ends it, or why there is none."""
        try:
            (tokens,) = self.tokenizer.encode([source[index]])
        except DataError as error:
            return error
        except UnicodeDecodeError as error:
            return not_utf8(source.place(index), error)
        return np.append(tokens, np.int32(self.tokenizer.end))

    def __str__(self) -> str:
        train, held_out = counted(len(self.train), self.corpus.noun), len(self.held_out)
        return f"{self.corpus.origin}: {train} to train on, {held_out} held out"


def open_collection(config: Config, corpus: Corpus, folder: Path | None) -> Collection:
    """Divides the records, and trains a tokenizer if need be; reads no more than that takes.

    Raises:
      ConfigError: too few records.
    """
    section = config.data
    count = _num_records(corpus, section.max_bytes)
    chosen, held_out = Chosen(corpus.source, range(count)), corpus.held_out
    if held_out is None:
        held = held_out_indices(count, section.held_out_fraction)
        held_out = Chosen(corpus.source, sorted(held))
        chosen = Chosen(corpus.source, [k for k in range(count) if k not in held])
    if not len(chosen) or not len(held_out):
        raise ConfigError(
            f"data: {counted(count, corpus.noun)} leave {len(chosen)} to train on and {len(held_out)} held out.",
            help="name more files in data.paths, give data.held_out_paths, or raise data.held_out_fraction.",
        )
    tokenizer = open_tokenizer(section, lambda: _texts(chosen), folder)
    return Collection(config=config, corpus=corpus, tokenizer=tokenizer, train=chosen, held_out=held_out)


def _num_records(corpus: Corpus, max_bytes: int | None) -> int:
    """How many records come before the one that would exceed ``max_bytes``."""
    if max_bytes is None:
        return len(corpus.source)
    room = max_bytes
    for index in range(len(corpus.source)):
        record = corpus.skipped.unless_corrupt(lambda index=index: corpus.source[index])
        room -= len(record or b"")
        if room < 0:
            return index
    return len(corpus.source)


def _texts(source: Source) -> Iterator[bytes]:
    """The records that can be read; the others are found when their turn comes."""
    for index in range(len(source)):
        try:
            yield source[index]
        except DataError:
            continue
