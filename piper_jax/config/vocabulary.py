"""The tokens of the data beside the vocabulary of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from piper_jax.config.data import DataSection
from piper_jax.config.schema import Config
from piper_jax.errors import ConfigError
from piper_jax.models.gpt_config import gpt_config
from piper_jax.models.moe_config import moe_config

BUILT_IN_MODELS: Mapping[str, Callable[..., object]] = {
    "gpt": gpt_config,
    "gpt_linen": gpt_config,
    "moe": moe_config,
}
"""Names of models, and what checks their arguments."""

NUM_BYTES = 256


def known_vocabulary(section: DataSection) -> tuple[int, str] | None:
    """How many tokens there will be, and why; None where only the tokenizer's file knows."""
    tokenizer = section.tokenizer
    if tokenizer.kind == "bytes":
        documents = section.packing == "documents"
        return NUM_BYTES + documents, "a byte each" + (", and one that ends a document" if documents else "")
    if tokenizer.file is None and tokenizer.vocab_size is not None:
        return tokenizer.vocab_size, "data.tokenizer.vocab_size"
    return None


def check_vocabulary(config: Config, size: int, why: str, at: str = "config") -> None:
    """Raises a ConfigError where the model's vocabulary is known and smaller than ``size``."""
    name, arguments = config.model.name, config.model.arguments
    sizes = BUILT_IN_MODELS[name](**arguments) if name in BUILT_IN_MODELS else None
    found = getattr(sizes, "vocab_size", arguments.get("vocab_size"))
    if isinstance(found, int) and found < size:
        raise ConfigError(
            f"{at}: model.arguments.vocab_size = {found}, but data.tokenizer has {size} tokens ({why}).",
            help=f"set model.arguments.vocab_size={size}, or more.",
        )
