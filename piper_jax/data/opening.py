"""From a configuration to its data."""

from __future__ import annotations

from pathlib import Path

from piper_jax.config import Config, check_vocabulary
from piper_jax.data.collection import Collection, open_collection
from piper_jax.data.corpus import open_corpus
from piper_jax.data.long_text import LongText, read_long_text

Data = LongText | Collection


def open_data(config: Config, folder: Path | None = None) -> Data:
    """The data of a configuration: text to train on and text that is held out.

    Args:
      folder: of the run, where a trained tokenizer is kept; None keeps nothing.

    Raises:
      ConfigError: a path that matches nothing, too little text, or a model with too small a vocabulary.
      DataError: a file or record that cannot be read, unless it may be left out.
    """
    corpus = open_corpus(config.data)
    read = open_collection if config.data.packing == "documents" else read_long_text
    data = read(config, corpus, folder)
    if config.data.tokenizer.kind != "bytes":
        check_vocabulary(config, data.tokenizer.size, config.data.tokenizer.file or "trained")
    return data
