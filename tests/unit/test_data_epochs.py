"""From files to batches through grain: every record once an epoch, on any number of processes, wherever it stops."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piper_jax.config import Config, DataSection, ModelSection, TrainSection
from piper_jax.data import Data, open_data
from piper_jax.data.order import ShuffledEpochs
from piper_jax.errors import DataError

pytestmark = pytest.mark.needs_jax  # grain imports it

BATCH, LENGTH, NUM_RECORDS = 16, 8, 97


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    sizes = np.random.default_rng(0).integers(1, 60, NUM_RECORDS)
    path.write_text("".join(json.dumps({"text": f"{k}:{'x' * size}"}) + "\n" for k, size in enumerate(sizes)))
    return path


def _opened(lines: Path, packing: str, seed: int = 0) -> Data:
    section = {"paths": (str(lines),), "packing": packing, "held_out_fraction": 0.1}
    return open_data(
        Config(
            data=DataSection.model_validate(section),
            model=ModelSection(arguments={"vocab_size": 257}),
            train=TrainSection(batch_size=BATCH, sequence_length=LENGTH, seed=seed),
        )
    )


def _drawn(
    data: Data, num_processes: int, num_batches: int, state: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Batches of rows from as many processes as there are, each of which keeps its own place."""
    rows = np.array_split(np.arange(BATCH), num_processes)
    processes = [data.training(rows=part.tolist()) for part in rows]
    for process in processes:
        if state is not None:
            process.restore(json.loads(json.dumps(state)))
    batches = [
        {name: np.concatenate([batch[name][part] for batch, part in zip(found, rows)]) for name in found[0]}
        for found in ([next(process) for process in processes] for _ in range(num_batches))
    ]
    states = [process.state() for process in processes]
    assert all(found == states[0] for found in states)
    return batches, states[0]


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_four_then_two_then_eight_processes_read_what_one_reads(lines: Path, packing: str):
    data = _opened(lines, packing)
    state, found = None, []
    for num_processes, num_batches in ((4, 5), (2, 9), (8, 40)):
        batches, state = _drawn(data, num_processes, num_batches, state)
        found += batches
    alone = data.training()
    for batch in found:
        expected = next(alone)
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)
    assert alone.state() == state


def test_every_document_is_read_once_an_epoch(lines: Path):
    data = _opened(lines, "documents")
    batches = data.training()
    size, begun, given = batches.num_records, [], Counter()
    for epoch in (1, 2, 3):
        while batches.position < epoch * size:
            given.update(next(batches)["targets"].ravel().tolist())
        documents = [data.at(k).tolist() for k in range((epoch - 1) * size, epoch * size)]
        begun.append([bytes(document[:-1]) for document in documents])
    assert all(len(set(texts)) == size == 97 - 9 for texts in begun)
    assert set(begun[0]) == set(begun[1]) == set(begun[2])
    assert begun[0] != begun[1] != sorted(begun[0])
    assert given[256] == batches.position - sum(document.has_more for document in batches.unfinished)
    held_out = data.held_out_batches()
    assert np.array_equal(held_out[0]["tokens"], _opened(lines, "documents", seed=5).held_out_batches()[0]["tokens"])


def test_held_out_documents_without_text_are_an_error(lines: Path, tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    section = DataSection(paths=(str(lines),), held_out_paths=(str(empty),), packing="documents")
    with pytest.raises(DataError, match="nothing is held out, since none of 1 line has any text"):
        open_data(Config(data=section)).held_out_batches()


def test_every_window_is_read_once_an_epoch(lines: Path):
    data = _opened(lines, "none")
    batches = data.training()
    size = batches.identity["records"]
    rows = [row.tobytes() for _ in range(3 * size // BATCH + 1) for row in next(batches)["tokens"]]
    epochs = [Counter(rows[k * size : (k + 1) * size]) for k in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert sum(epochs[0].values()) == size
    assert rows[:size] != rows[size : 2 * size]


def test_the_order_depends_on_seed_and_epoch():
    orders = [
        [ShuffledEpochs(size=50, seed=seed)(epoch * 50 + k) for k in range(50)] for seed in (0, 1) for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert [ShuffledEpochs(size=1, seed=3)(k) for k in range(4)] == [0] * 4
