"""One long text: what is held out, what a batch depends on, entropy; and what is measured of a run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_jax.config import Config, DataSection, TrainSection
from piper_jax.data import open_data
from piper_jax.data.corpus import divided, unigram_entropy
from piper_jax.data.long_text import LongText
from piper_jax.data.windows import ShuffledWindows, held_out_windows
from piper_jax.errors import ConfigError
from piper_jax.train.metrics import Meter, Summary

TEXT = np.arange(10_000, dtype=np.int64).astype(np.uint8)


def _opened(section: DataSection, sequence_length: int = 16) -> LongText:
    data = open_data(Config(data=section, train=TrainSection(sequence_length=sequence_length)))
    assert isinstance(data, LongText)
    return data


@settings(deadline=None)
@given(size=st.integers(0, 500_000), fraction=st.floats(0.01, 0.5))
def test_the_parts_are_a_partition_of_the_text(size: int, fraction: float):
    text = np.arange(size, dtype=np.int64).astype(np.uint8)
    train, held_out = divided(text, fraction)
    assert len(train) + len(held_out) == size
    assert np.array_equal(
        np.bincount(train, minlength=256) + np.bincount(held_out, minlength=256), np.bincount(text, minlength=256)
    )


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.5])
def test_the_held_out_part_has_the_size_asked_for(fraction: float):
    _, held_out = divided(np.zeros(3_000_000, np.uint8), fraction)
    assert len(held_out) / 3_000_000 == pytest.approx(fraction, rel=0.15)


def test_default_text_is_the_standard_library():
    corpus = _opened(DataSection())
    assert corpus.num_records > 100
    assert len(corpus.train) > 1_000_000
    assert 2.5 < unigram_entropy(corpus.held_out) < 4.0
    assert "standard library" in str(corpus)


def test_files_and_globs_are_read_in_order_and_once(tmp_path: Path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name[-5:-4].encode() * 1000)
    section = DataSection(paths=(str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt")), held_out_fraction=0.5)
    corpus = _opened(section)
    assert corpus.num_records == 3
    assert [chr(k) for k, _ in itertools.groupby(corpus.train)] == ["b", "a", "c"]


def test_a_block_does_not_begin_within_a_character():
    text = np.frombuffer(("é" * 5000).encode(), np.uint8)
    for part in divided(text, 0.3):
        assert set(part.tobytes().decode()) == {"é"}


def test_no_more_than_max_bytes_are_read(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    corpus = _opened(DataSection(paths=(str(tmp_path / "*"),), max_bytes=1500))
    assert len(corpus.train) + len(corpus.held_out) == 1500


def test_a_path_that_matches_nothing_suggests_its_neighbour(tmp_path: Path):
    (tmp_path / "novel.txt").write_bytes(b"x" * 1000)
    with pytest.raises(ConfigError, match=r"matches no file\.\nhelp: did you mean '.*novel\.txt'"):
        _opened(DataSection(paths=(str(tmp_path / "novle.txt"),)))


def test_too_little_text_is_refused(tmp_path: Path):
    (tmp_path / "short.txt").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="100 bytes of text leave a part of 8 bytes, but 130 are needed"):
        _opened(DataSection(paths=(str(tmp_path / "short.txt"),)), sequence_length=128)


def _windows(text: np.ndarray = TEXT, **changes: object) -> ShuffledWindows:
    options = {"batch_size": 4, "sequence_length": 16, "order": lambda position: position % 600} | changes
    return ShuffledWindows(text=text, **options)


def test_targets_are_the_next_bytes():
    batch = next(_windows())
    assert batch["tokens"].shape == batch["targets"].shape == (4, 16)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    assert np.array_equal(batch["targets"], (batch["tokens"] + 1) % 256)


def test_a_batch_depends_on_the_state_alone():
    batches = _windows()
    first = [next(batches)["tokens"] for _ in range(5)]
    again = _windows()
    again.restore({"position": 12})
    assert np.array_equal(next(again)["tokens"], first[3])
    assert again.state() == {"position": 16}


def test_rows_that_nobody_wants_are_zeros():
    whole, part = next(_windows()), next(_windows(rows=[1, 2]))
    assert np.array_equal(part["targets"][1:3], whole["targets"][1:3])
    assert not part["tokens"][[0, 3]].any()


def test_the_shortest_legal_text_gives_batches():
    batches = _windows(TEXT[:17], order=lambda position: 0)
    assert np.array_equal(next(batches)["targets"][0], TEXT[1:17])


def test_held_out_batches_span_the_text():
    batches = held_out_windows(TEXT[:1000], num_batches=3, batch_size=4, sequence_length=16)
    assert len(batches) == 3
    assert batches[0]["tokens"][0, 0] == TEXT[0]
    assert batches[-1]["targets"][-1, -1] == TEXT[999]


def test_entropy_is_in_nats():
    assert unigram_entropy(np.zeros(10, np.uint8)) == 0
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))


def test_the_meter_leaves_the_first_step_out_and_forgets_old_ones():
    ends = iter([100.0, 101.0, *(101.0 + 0.5 * k for k in range(1, 40))])
    meter = Meter(tokens_per_step=10, clock=lambda: next(ends))
    assert meter.step_ended() is None
    assert meter.step_ended() == pytest.approx(10.0)
    rates = [meter.step_ended() for _ in range(39)]
    assert rates[-1] == pytest.approx(20.0)


def test_the_meter_does_not_count_a_pause():
    ends = iter([100.0, 101.0, 150.0, 152.0])
    meter = Meter(tokens_per_step=10, clock=lambda: next(ends))
    for _ in range(2):
        meter.step_ended()
    meter.restarted()
    assert meter.step_ended() == pytest.approx(5.0)
    assert meter.first_ended == 100.0


def test_the_summary_compares_with_the_unigram_entropy():
    summary = Summary(
        num_steps=10, held_out_loss=2.0, unigram_entropy=3.2, compile_seconds=1, train_seconds=9, tokens_per_second=1e3
    )
    assert "held-out loss    2.000 nats per byte, 1.200 nats below it" in str(summary)
