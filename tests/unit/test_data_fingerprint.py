"""A run goes on with the files that it was saved with, wherever they lie, and with no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper_jax.config import Config, DataSection, TrainSection
from piper_jax.data import open_data
from piper_jax.data.fingerprint import BLOCK_BYTES, fingerprint
from piper_jax.errors import ConfigError


def _written(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_another_order_another_letter_and_another_number_of_records_are_noticed(tmp_path: Path, packing: str):
    texts = [f"document {k:03} says what it has to say" for k in range(40)]

    def batches(folder: str, texts: list[str]):
        section = DataSection.model_validate({"paths": str(_written(tmp_path / folder, texts)), "packing": packing})
        return open_data(Config(data=section, train=TrainSection(batch_size=2, sequence_length=16))).training()

    before = batches("before", texts)
    next(before)
    state = json.loads(json.dumps(before.state()))
    batches("moved", texts).restore(state)
    changed = {
        "order": texts[::-1],
        "letter": [*texts[:7], texts[7].replace("has", "had"), *texts[8:]],
        "fewer": texts[1:],
    }
    for name, other in changed.items():
        with pytest.raises(ConfigError, match="other data") as caught:
            batches(name, other).restore(state)
        assert "files: " in str(caught.value)


def test_of_many_bytes_blocks_at_equal_distances_are_read(tmp_path: Path):
    path, budget = tmp_path / "a", 4 * BLOCK_BYTES
    path.write_bytes(bytes(10 * BLOCK_BYTES))
    known = fingerprint([path], budget)
    for place, noticed in (
        (0, True),
        (10 * BLOCK_BYTES - 1, True),
        (3 * BLOCK_BYTES + 9, True),
        (2 * BLOCK_BYTES, False),
    ):
        data = bytearray(10 * BLOCK_BYTES)
        data[place] = 1
        path.write_bytes(data)
        assert (fingerprint([path], budget) != known) is noticed
    path.write_bytes(bytes(10 * BLOCK_BYTES + 1))
    assert fingerprint([path], budget) != known
