"""What pydantic finds wrong, said in the user's terms: place, key, fault, suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from piper_jax.config.text import Document, Path
from piper_jax.errors import ConfigError, suggest

MAX_VALUE = 40
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with keys",
    "missing": "a value",
}


def config_fault(error: ValidationError, document: Document, schema: type[BaseModel]) -> ConfigError:
    """All faults as one error of at most 12 lines."""
    found = [_described(detail, document, schema) for detail in error.errors()]
    if len(found) == 1:
        return ConfigError(found[0][0], help=found[0][1])
    details = [f"{text} {fix}" for text, fix in found]
    return ConfigError(f"{document.place(())}: {len(found)} faults.", detail=details, help="correct each of them.")


def _described(detail: ErrorDetails, document: Document, schema: type[BaseModel]) -> tuple[str, str]:
    """The fault, and what would be right."""
    path: Path = detail["loc"]
    key, at = ".".join(map(str, path)), document.place(path)
    if detail["type"] == "extra_forbidden":
        return f"{at}: unknown key {key!r}.", _nearest_key(path, schema)
    expected = EXPECTED.get(detail["type"]) or _condition(detail)
    return f"{at}: {key} = {_shown(detail['input'])}: {expected} is expected.", _default(path, schema)


def _condition(detail: ErrorDetails) -> str:
    context: Mapping[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "literal_error":
            return str(context["expected"])
        case "greater_than_equal":
            return f"a number from {context['ge']}"
        case "greater_than":
            return f"a number above {context['gt']}"
        case "less_than_equal":
            return f"a number up to {context['le']}"
        case "less_than":
            return f"a number below {context['lt']}"
        case _:
            return detail["msg"].removeprefix("Input should be ")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def _nearest_key(path: Path, schema: type[BaseModel]) -> str:
    """The nearest key of the same section, or the same key of another one; ``lr`` is near ``learning_rate``."""
    *above, key = path
    known = _fields(schema, above)
    elsewhere = [f"{name}.{key}" for name in _fields(schema, ()) if key in _fields(schema, (name,))]
    if not difflib.get_close_matches(str(key), known, n=1, cutoff=0.6):
        initials = [name for name in known if "".join(word[0] for word in name.split("_")) == key]
        for found in (*initials, *elsewhere):
            return f"did you mean {found!r}?"
    return suggest(str(key), known)


def _default(path: Path, schema: type[BaseModel]) -> str:
    *above, key = path
    field = _fields(schema, above).get(str(key))
    if field is None or field.is_required() or isinstance(field.default, BaseModel):
        return "see the configurations in configs/."
    return f"the default is {'null' if field.default is None else field.default}."


def _fields(schema: type[BaseModel], path: Sequence[str | int]) -> Mapping[str, FieldInfo]:
    section: type[BaseModel] | None = schema
    for name in path:
        field = section.model_fields.get(str(name)) if section else None
        section = _section(field.annotation) if field is not None else None
    return section.model_fields if section else {}


def _section(annotation: object) -> type[BaseModel] | None:
    """The section that an annotation names, alone or beside null."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None
