"""Packed documents: what a batch holds, and that every document comes once, whoever draws and wherever it stops."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from piper_jax.data.documents import PackedDocuments, held_out_documents
from piper_jax.data.packing import packed
from piper_jax.data.skipping import Skipped
from piper_jax.data.tokenizer import Tokens
from piper_jax.errors import ConfigError, DataError

END = 9
CORRUPT = DataError("a.jsonl:3: not JSON.", help="mend it.")


def _document(number: int, length: int) -> Tokens:
    """Tokens that say which document and which place they are of, and the one that ends it."""
    return np.array([100 * (number + 1) + place for place in range(length)] + [END], np.int32)


class _Documents:
    """Of these lengths (None: corrupt), the later epochs in reverse order."""

    def __init__(self, lengths: list[int | None]):
        self.lengths = lengths

    def at(self, position: int) -> Tokens | DataError:
        epoch, index = divmod(position, len(self.lengths))
        number = index if epoch == 0 else len(self.lengths) - 1 - index
        length = self.lengths[number]
        return CORRUPT if length is None else _document(number, length)

    def since(self, position: int) -> Iterator[Tokens | DataError]:
        return map(self.at, itertools.count(position))


def _batches(
    lengths: list[int | None], batch_size: int, sequence_length: int, limit: int = 0, **identity: object
) -> PackedDocuments:
    return PackedDocuments(
        documents=_Documents(lengths),
        num_records=len(lengths),
        batch_size=batch_size,
        sequence_length=sequence_length,
        identity=identity,
        skipped=Skipped(limit=limit),
    )


def _pairs(documents: Iterable[Tokens]) -> Counter[tuple[int, int]]:
    return Counter(pair for document in documents for pair in itertools.pairwise(document.tolist()))


def test_documents_lie_side_by_side():
    batch = packed([_document(0, 3), _document(1, 4), _document(2, 1)], batch_size=2, sequence_length=5)
    assert batch["tokens"].tolist() == [[100, 101, 102, 200, 201], [202, 203, 300, 0, 0]]
    assert batch["targets"].tolist() == [[101, 102, 9, 201, 202], [203, 9, 9, -1, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


@settings(deadline=None, max_examples=150)
@example(lengths=[1, 0], sizes=[(1, 1)], drawn=3)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4),
    drawn=st.integers(1, 12),
)
def test_every_document_comes_once_an_epoch(lengths: list[int], sizes: list[tuple[int, int]], drawn: int):
    """What was given and what waits are all documents up to the position, once each, though other sizes go on."""
    found: Counter[tuple[int, int]] = Counter()
    state = _batches(lengths, 1, 1).state()
    for batch_size, sequence_length in sizes:
        batches = _batches(lengths, batch_size, sequence_length)
        batches.restore(json.loads(json.dumps(state)))
        for _ in range(drawn):
            batch = next(batches)
            assert (batch["segment_ids"] > 0).all()
            found.update(zip(batch["tokens"].ravel().tolist(), batch["targets"].ravel().tolist()))
        state = batches.state()
    waiting = _pairs(document.tokens[document.offset :] for document in batches.unfinished)
    assert found + waiting == _pairs(_Documents(lengths).at(k) for k in range(state["position"]))
    assert len(batches.unfinished) <= max(batch_size for batch_size, _ in sizes)


def test_rows_of_long_documents_are_of_different_ones():
    batches = _batches([20, 20, 3, 20], 3, 4)
    assert next(batches)["tokens"][:, 0].tolist() == [100, 200, 300]
    assert [[d.position, d.offset] for d in batches.unfinished] == [[0, 4], [1, 4], [3, 1]]
    assert next(batches)["tokens"].tolist() == [[104, 105, 106, 107], [204, 205, 206, 207], [401, 402, 403, 404]]


def test_corrupt_documents_are_errors_or_are_left_out_up_to_a_bound():
    lengths = [2, None, 2]
    with pytest.raises(DataError, match=r"a\.jsonl:3: not JSON"):
        next(_batches(lengths, 2, 4))
    batches = _batches(lengths, 1, 4, limit=1)
    assert next(batches)["tokens"].tolist() == [[100, 101, 300, 301]]
    next(batches)
    assert batches.state()["skipped"] == ["a.jsonl:3: not JSON."]
    assert str(batches.skipped) == "1 corrupt record left out\n    a.jsonl:3: not JSON."
    batches.skipped.reasons["b.jsonl:1: not JSON."] = None
    with pytest.raises(DataError, match=r"2 corrupt records, and data\.max_corrupt = 1"):
        next(batches)


def test_an_epoch_without_text_is_an_error():
    with pytest.raises(DataError, match="none of 3 records has any text"):
        next(_batches([0, 0, 0], 1, 4))


def test_a_state_of_other_data_is_refused():
    batches = _batches([3], 1, 4, records=1, tokenizer="abc")
    state = batches.state() | {"tokenizer": "bytes"}
    with pytest.raises(ConfigError, match=r"other data[^\n]*\n    tokenizer: 'bytes' then, 'abc' now\nhelp:"):
        batches.restore(state)


def test_held_out_batches_end_with_padding():
    documents = [_document(0, 5), CORRUPT, _document(1, 2), _document(2, 4)]
    options = {"batch_size": 2, "sequence_length": 4, "skipped": Skipped(limit=1)}
    batches = held_out_documents(documents, num_batches=3, **options)
    assert [int((batch["targets"] != -1).sum()) for batch in batches] == [8, 3]
    assert len(held_out_documents(documents, num_batches=1, **options)) == 1
