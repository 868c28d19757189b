"""Bytes of a record as its text, and what is said where they are none."""

from __future__ import annotations

import json
from typing import Any, cast

from piper_jax.errors import DataError, suggest

OR_SKIP = "or leave such records out with data.on_corrupt=skip."


def text_of_json(record: bytes, field: str, place: str) -> bytes:
    """The text under a key of a JSON object.

    Raises:
      DataError: it is not UTF-8, not JSON, no object, or the key is missing or holds no text.
    """
    try:
        values: Any = json.loads(record.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(place, error) from None
    except (RecursionError, ValueError) as error:
        if not isinstance(error, json.JSONDecodeError):
            what = f"{place}: JSON that Python does not read: {str(error).splitlines()[0]}."
            raise DataError(what, help=f"mend the record, {OR_SKIP}") from None
        raise DataError(
            f"{place}: not JSON: {error.msg} at column {error.colno}.", help=f"mend the record, {OR_SKIP}"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{place}: a JSON {type(values).__name__}, no object.", help=f"mend the record, {OR_SKIP}")
    found = cast(dict[str, Any], values)
    if field not in found:
        near = suggest(field, found) if found else "it has no keys."
        raise DataError(f"{place}: the record has no key {field!r}.", help=f"set data.field; {near}")
    if not isinstance(text := found[field], str):
        raise DataError(
            f"{place}: {field!r} is a {type(text).__name__}, no text.",
            help=f"mend the record or set data.field, {OR_SKIP}",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {field!r} holds half a surrogate pair at character {error.start}.",
            help=f"mend the record, {OR_SKIP}",
        ) from None


def not_utf8(place: str, error: UnicodeDecodeError) -> DataError:
    """The fault of a record that is no UTF-8 text."""
    return DataError(f"{place}: not UTF-8 text at byte {error.start}.", help=f"convert the file to UTF-8, {OR_SKIP}")
