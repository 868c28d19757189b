"""Byte-pair encoding by the ``tokenizers`` package: loaded from a file, or trained and kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from piper_jax.config import TokenizerSection
from piper_jax.data.tokenizer import Tokens
from piper_jax.errors import ConfigError, suggest, writing

END = "<|endoftext|>"
USUAL_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
FILE_NAME = "tokenizer.json"
DIGEST_CHARACTERS = 16


class BytePairs:
    """A tokenizer of the ``tokenizers`` package. Text that spells a special token is ordinary text."""

    unit = "token"

    def __init__(self, tokenizer: Any, end: str | None):
        """Wraps one.

        Args:
          end: the name of the token that ends a document; None: a usual one, or else one token more.
        """
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        known: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in known:
            raise ConfigError(f"data.tokenizer.end: there is no token {end!r}.", help=suggest(end, _special(known)))
        usual = (name for name in USUAL_ENDS if name in known)
        found = known.get(end or next(usual, ""))
        highest = max(known.values())
        self._tokenizer = tokenizer
        self.end = highest + 1 if found is None else found
        self.size = max(highest, self.end) + 1
        text = f"{tokenizer.to_str()}{self.end}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        decoded = [text.decode() for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def open_byte_pairs(section: TokenizerSection, texts: Callable[[], Iterable[bytes]], folder: Path | None) -> BytePairs:
    """Loads the file that the section names, or that an earlier start of the run left; else trains."""
    if section.file is not None:
        return BytePairs(_loaded(Path(section.file), "data.tokenizer.file"), section.end)
    kept = None if folder is None else folder / FILE_NAME
    if kept is not None and kept.exists():
        return BytePairs(_loaded(kept, "data.tokenizer"), section.end)
    assert section.vocab_size is not None
    trained = train_byte_pairs(texts(), section.vocab_size, section.training_bytes)
    if kept is not None:
        _save(trained, kept)
    return BytePairs(trained, section.end)


def train_byte_pairs(texts: Iterable[bytes], vocab_size: int, max_bytes: int) -> Any:
    """A byte-level BPE tokenizer (as of GPT-2): every text has tokens, and ``<|endoftext|>`` ends a document.

    Args:
      vocab_size: of the result, at most; a short text gives fewer.
      max_bytes: of the texts that are read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_limited(texts, max_bytes), trainer)
    return tokenizer


def _limited(texts: Iterable[bytes], max_bytes: int) -> Iterator[str]:
    """The first texts of that many bytes together; what is no UTF-8 is found later, when it is encoded."""
    room = max_bytes
    for text in texts:
        if room <= 0:
            return
        yield text[:room].decode(errors="replace")
        room -= len(text)


def _loaded(path: Path, key: str) -> Any:
    from tokenizers import Tokenizer

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{key}: {path}: {reason}.", help="give the path of a tokenizer.json.") from None
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(
            f"{key}: {path}: no tokenizer: {error}.", help="give a tokenizer.json of the tokenizers package."
        ) from None


def _save(tokenizer: Any, path: Path) -> None:
    """Whole or not at all, whichever of several processes comes first."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f".{path.name}.{os.getpid()}")
        own.write_text(tokenizer.to_str(), encoding="utf-8")
        os.replace(own, path)


def _special(known: Iterable[str]) -> list[str]:
    """Names that look like those of special tokens."""
    return [name for name in known if len(name) > 2 and name[0] in "<[" and name[-1] in ">]"]
