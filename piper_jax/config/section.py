"""The base of all sections of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """Strict and frozen: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def several(value: object) -> object:
    """YAML has lists; a single item may stand for a list of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, (str, dict)) else value
