"""YAML in and out, by the core schema of YAML 1.2: ``1e-4`` is a number, ``no`` and ``12:30`` are strings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel

from piper_jax.errors import ConfigError

Path = tuple[str | int, ...]

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [c.strip("\0") for c in _first])
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value, 16 if "0x" in node.value else 10))
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda _, node: float(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML mapping, and where each of its keys stands.

    Attributes:
      values: plain dicts, lists, strings, numbers, booleans and None.
      places: path of keys and indices -> ``file.yaml:12``, or the override that set it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Where the value at ``path``, or the innermost part of it that exists, was written."""
        return next((self.places[path[:k]] for k in range(len(path), -1, -1) if path[:k] in self.places), "")


def parse_document(text: str, name: str) -> Document:
    """Reads one YAML mapping.

    Args:
      name: of the file, for messages.

    Raises:
      ConfigError: it is not YAML, not a mapping, or names a key twice.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(places={(): name})
        places: dict[Path, str] = {(): name}
        _locate(node, (), name, places)
        values = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{at}: not YAML: {getattr(error, 'problem', error)}.", help="see yaml.org/spec.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: not a mapping of sections.", help="write `train:` and its keys below it.")
    return Document(values=values, places=places)


def parse_value(text: str) -> Any:
    """One YAML value, such as the right side of ``key=value``; raises ``yaml.YAMLError``."""
    return _Loader(text).get_single_data()


def config_text(config: BaseModel) -> str:
    """The whole configuration as YAML, defaults included; loading it gives an equal configuration."""
    return yaml.dump(_plain(config.model_dump()), Dumper=_Dumper, sort_keys=False, default_flow_style=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _locate(node: yaml.Node, path: Path, name: str, places: dict[Path, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner, at = (*path, key.value), f"{name}:{key.start_mark.line + 1}"
            if inner in places:
                raise ConfigError(f"{at}: {'.'.join(map(str, inner))} is given twice.", help="keep one of them.")
            places[inner] = at
            _locate(value, inner, name, places)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            places[(*path, index)] = f"{name}:{value.start_mark.line + 1}"
            _locate(value, (*path, index), name, places)
