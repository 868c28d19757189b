"""Byte pairs: trained, kept, loaded; how many tokens there are, and what the model must have."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from piper_jax.config import Config, DataSection, ModelSection, TokenizerSection, TrainSection, load_config_text
from piper_jax.data import open_data
from piper_jax.data.byte_pairs import BytePairs, open_byte_pairs, train_byte_pairs
from piper_jax.errors import ConfigError

TEXTS = [b"the cat sat on the mat. " * 20, "Größe und Grüße. ".encode() * 20]
SECTION = TokenizerSection(kind="bpe", vocab_size=270)


def _trained() -> BytePairs:
    return BytePairs(train_byte_pairs(TEXTS, 270, 10_000), None)


def test_encoding_is_exact_and_special_tokens_in_a_text_are_text():
    tokenizer = _trained()
    text = "Grüße <|endoftext|> \x00 the cat 猫".encode()
    (tokens,) = tokenizer.encode([text])
    assert tokens.dtype == np.int32
    assert tokenizer.end not in tokens
    assert tokenizer._tokenizer.decode(tokens.tolist()).encode() == text
    assert (tokenizer.size, tokenizer.end) == (270, 0)


def test_training_reads_no_more_than_its_bound_and_always_gives_the_same():
    read: list[int] = []
    texts = (read.append(k) or TEXTS[0] for k in itertools.count())
    train_byte_pairs(texts, 260, 3 * len(TEXTS[0]))
    assert len(read) <= 4
    program = "import test_data_tokenizers as t; print(t._trained().digest)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert other.stdout.strip() == _trained().digest, other.stderr


def test_a_trained_tokenizer_is_kept_in_the_folder_and_found_again(tmp_path: Path):
    first = open_byte_pairs(SECTION, lambda: TEXTS, tmp_path / "run")
    again = open_byte_pairs(SECTION, lambda: [b"other text"], tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.json"]
    assert first.digest == again.digest
    loaded = open_byte_pairs(TokenizerSection(kind="bpe", file=str(tmp_path / "run" / "tokenizer.json")), list, None)
    assert loaded.digest == first.digest


def test_a_tokenizer_without_an_end_gets_one_more_token(tmp_path: Path):
    from tokenizers import Tokenizer, models

    plain = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert (BytePairs(plain, None).end, BytePairs(plain, None).size) == (2, 3)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.end: there is no token '<end>'"):
        BytePairs(_trained()._tokenizer, "<end>")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file or directory."), ("{}", "no tokenizer: "), (b"\xff", "not UTF-8 text.")],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str | bytes | None, message: str):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        open_byte_pairs(TokenizerSection(kind="bpe", file=str(path)), list, None)
    assert str(caught.value).startswith(f"data.tokenizer.file: {path}: {message}")


@pytest.mark.parametrize(
    ("data", "vocab_size", "message"),
    [
        (
            "packing: documents",
            256,
            "= 256, but data.tokenizer has 257 tokens (a byte each, and one that ends a document)",
        ),
        ("packing: none", 200, "= 200, but data.tokenizer has 256 tokens (a byte each)"),
        ("tokenizer: {kind: bpe, vocab_size: 512}", 500, "= 500, but data.tokenizer has 512 tokens"),
        ("tokenizer: bpe", 256, "data.tokenizer: bpe has neither file nor vocab_size."),
        ("tokenizer: {kind: bpe, vocab_size: 512, file: a}", 512, "data.tokenizer: bpe has both file and vocab_size."),
        ("tokenizer: {vocab_size: 512}", 512, "data.tokenizer: bytes have no vocab_size."),
    ],
)
def test_tokenizer_and_model_fit_each_other(data: str, vocab_size: int, message: str):
    text = f"data: {{{data}}}\nmodel: {{arguments: {{vocab_size: {vocab_size}}}}}"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, name="run.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.yaml:")


def test_max_bytes_do_not_end_within_a_character(tmp_path: Path):
    (tmp_path / "a.txt").write_text("é" * 500, encoding="utf-8")
    options = {"paths": (str(tmp_path / "a.txt"),), "max_bytes": 401, "held_out_fraction": 0.5}
    section = DataSection(tokenizer=TokenizerSection(kind="bpe", vocab_size=257), **options)
    model, train = ModelSection(arguments={"vocab_size": 257}), TrainSection(sequence_length=4)
    assert sum(open_data(Config(data=section, model=model, train=train)).num_bytes) == 400


def test_a_loaded_tokenizer_is_checked_when_it_is_loaded(tmp_path: Path):
    (tmp_path / "t.json").write_text(_trained()._tokenizer.to_str())
    section = DataSection(tokenizer=TokenizerSection(kind="bpe", file=str(tmp_path / "t.json")), max_bytes=100_000)
    with pytest.raises(ConfigError, match=r"model\.arguments\.vocab_size = 256, but data\.tokenizer has 270 tokens"):
        open_data(Config(data=section))
