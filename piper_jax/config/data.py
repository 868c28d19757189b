"""The section of the data: files, tokens, sequences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from piper_jax.config.section import Count, Number, Section, several


def _tokenizer(value: object) -> object:
    """``bytes`` for ``{kind: bytes}``."""
    return {"kind": value} if isinstance(value, str) else value


class TokenizerSection(Section):
    """How text becomes tokens.

    Attributes:
      kind: ``bytes``: each byte of UTF-8 is a token; ``bpe``: byte pairs, by the ``tokenizers`` package.
      file: with ``bpe``, a ``tokenizer.json`` to load.
      vocab_size: with ``bpe`` and no file, how many tokens to train, on the training part; the result is kept in the
        run folder.
      training_bytes: of text to train on, at most.
      end: the token after a document's last one; None means ``<|endoftext|>``, ``</s>`` or another usual name, or
        one more than the tokenizer has.
    """

    kind: Literal["bytes", "bpe"] = "bytes"
    file: str | None = None
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    training_bytes: Count = 10_000_000
    end: str | None = None


class DataSection(Section):
    """Which text, and how it is cut into sequences.

    Attributes:
      paths: files or globs (``**`` for any depth); none means the Python standard library's own sources.
      format: of the files; ``auto`` goes by the suffix: ``.jsonl``, ``.array_record``, anything else is text. A record
        is a text file, a line of JSONL, or a record of an ArrayRecord file, which holds text or JSON.
      field: the key of the text, in records of JSON.
      packing: ``none``: the records are one long text, cut into sequences of equal length, which are shuffled;
        ``documents``: the records are shuffled, sequences are filled with them, and attention stays within a record.
      tokenizer: ``bytes``, or a section.
      held_out_paths: files that are only evaluated on; none means ``held_out_fraction`` of ``paths``.
      held_out_fraction: the part that is only evaluated on.
      max_bytes: read no more than this many bytes; None means all.
      on_corrupt: what a record that cannot be read does: it is an ``error``, or is left out (``skip``) and reported.
      max_corrupt: more of them than this are an error all the same.
    """

    paths: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    format: Literal["auto", "text", "jsonl", "array_record", "array_record_json"] = "auto"
    field: str = "text"
    packing: Literal["none", "documents"] = "none"
    tokenizer: Annotated[TokenizerSection, BeforeValidator(_tokenizer)] = TokenizerSection()
    held_out_paths: Annotated[tuple[str, ...], BeforeValidator(several)] = ()
    held_out_fraction: Annotated[Number, Field(gt=0, le=0.5)] = 0.05
    max_bytes: Count | None = None
    on_corrupt: Literal["error", "skip"] = "error"
    max_corrupt: Count = 100
