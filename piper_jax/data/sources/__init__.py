"""Records of text in files, by number: text files, JSONL, ArrayRecord."""

from piper_jax.data.sources.base import Source
from piper_jax.data.sources.opening import open_source

__all__ = ["Source", "open_source"]
