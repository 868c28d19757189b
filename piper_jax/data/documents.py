"""Endless batches that are filled with documents. Imports no JAX."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from piper_jax.data.batches import Batch, check_identity
from piper_jax.data.packing import packed
from piper_jax.data.skipping import Skipped
from piper_jax.data.tokenizer import Tokens
from piper_jax.errors import DataError, counted


class Documents(Protocol):
    """Documents by position in the run, each with the token that ends it; what cannot be read comes as its error."""

    def at(self, position: int) -> Tokens | DataError: ...

    def since(self, position: int) -> Iterator[Tokens | DataError]:
        """Those from a position on, without end."""
        ...


@dataclass(slots=True, kw_only=True)
class Unfinished:
    """A document of which a part is still to come.

    Attributes:
      position: of the document in the run.
      tokens: with the one that ends it.
      offset: of the next token to come.
    """

    position: int
    tokens: Tokens
    offset: int = 0

    def take(self, room: int) -> Tokens:
        """Up to ``room`` tokens, and one more that is the target of the last one."""
        piece = self.tokens[self.offset : self.offset + room + 1]
        self.offset += len(piece) - 1
        return piece

    @property
    def has_more(self) -> bool:
        return self.offset < len(self.tokens) - 1


@dataclass(slots=True, kw_only=True)
class PackedDocuments:
    """Each document once an epoch, in another order every time, without padding.

    A row takes up documents until it is full. What is left of its last one waits for the next batch, so that the rows
    of a batch are of different documents, however long these are. An epoch that does not end with a batch goes on in
    the next one, and no record of an epoch is taken up before all of the one before have been.

    Where a row begins depends on the tokens before it, so every process reads the documents of the whole batch.

    Attributes:
      num_records: of an epoch.
      identity: what ``position`` depends on.
      position: documents that were taken up.
      unfinished: those of them that wait, the oldest first.
    """

    documents: Documents
    num_records: int
    batch_size: int
    sequence_length: int
    identity: Mapping[str, Any] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    position: int = 0
    unfinished: deque[Unfinished] = field(default_factory=deque)
    _stream: Iterator[Tokens | DataError] | None = None

    def __next__(self) -> Batch:
        pieces: list[Tokens] = []
        later: list[Unfinished] = []
        for _ in range(self.batch_size):
            room = self.sequence_length
            while room:
                document = self.unfinished.popleft() if self.unfinished else self._taken_up()
                pieces.append(document.take(room))
                room -= len(pieces[-1]) - 1
                if document.has_more:
                    later.append(document)
        self.unfinished.extend(later)
        return packed(pieces, batch_size=self.batch_size, sequence_length=self.sequence_length)

    def state(self) -> dict[str, Any]:
        return {
            **self.identity,
            "position": self.position,
            "unfinished": [[document.position, document.offset] for document in self.unfinished],
            "skipped": list(self.skipped.reasons),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        check_identity(state, self.identity)
        self.skipped.reasons = dict.fromkeys(state["skipped"])
        self.position, self._stream = state["position"], None
        self.unfinished = deque(self._again(position, offset) for position, offset in state["unfinished"])

    def _taken_up(self) -> Unfinished:
        """The next document that has any text: among so many records there is a whole epoch."""
        for _ in range(2 * self.num_records - 1):
            if self._stream is None:
                self._stream = self.documents.since(self.position)
            found = next(self._stream)
            self.position += 1
            if isinstance(found, DataError):
                self.skipped.take(found)
            elif len(found) > 1:
                return Unfinished(position=self.position - 1, tokens=found)
        raise DataError(
            f"data: none of {counted(self.num_records, 'record')} has any text.",
            help="look at data.paths and data.field.",
        )

    def _again(self, position: int, offset: int) -> Unfinished:
        """One that was waiting when the state was saved."""
        tokens = self.documents.at(position)
        if isinstance(tokens, DataError):
            raise tokens
        return Unfinished(position=position, tokens=tokens, offset=offset)


def held_out_documents(
    documents: Iterable[Tokens | DataError],
    *,
    num_batches: int,
    batch_size: int,
    sequence_length: int,
    skipped: Skipped,
) -> list[Batch]:
    """The first batches that documents fill; fewer where they are few, and the last one may have padding."""
    batches: list[Batch] = []
    pieces: list[Tokens] = []
    size = batch_size * sequence_length
    room = size
    for document in documents:
        if isinstance(document, DataError):
            skipped.take(document)
            continue
        offset = 0
        while offset < len(document) - 1 and len(batches) < num_batches:
            end = min(offset + room, len(document) - 1)
            pieces.append(document[offset : end + 1])
            room, offset = room - (end - offset), end
            if not room:
                batches.append(packed(pieces, batch_size=batch_size, sequence_length=sequence_length))
                pieces, room = [], size
        if len(batches) == num_batches:
            return batches
    if pieces:
        batches.append(packed(pieces, batch_size=batch_size, sequence_length=sequence_length))
    return batches
