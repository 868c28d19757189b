"""What a checkpoint says of itself: its leaves with their hashes, and all that is no array. Imports no JAX.

The manifest is written last of all and committed with the step; it carries a hash of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from piper_jax.errors import CheckpointError

Item = Literal["params", "opt_state"]
ITEMS: tuple[Item, ...] = ("params", "opt_state")
FORMAT = 1
MANIFEST = Path("manifest", "manifest.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRecord:
    """One leaf.

    Attributes:
      keys: on the way to it.
      dtype: as JAX prints it; of random keys ``key<...>``, and their data are stored.
      sha256: of dtype, shape and bytes of what is stored, see :func:`digest`.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def name(self) -> str:
        """``layers.0.kernel``, which is also that of its folder."""
        return ".".join(self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without its arrays.

    Attributes:
      step: steps done.  random_key: data of the key that slices draw from.
      leaves: of parameters and optimizer state.
      data: the state of the data pipeline.  config: of the run.  versions: of what wrote it.
    """

    step: int
    random_key: tuple[int, ...]
    leaves: Mapping[Item, tuple[LeafRecord, ...]]
    data: Any
    config: Any
    versions: Mapping[str, str]

    def text(self) -> str:
        """As JSON, with the hash of the rest in its last line."""
        values = {
            "format": FORMAT,
            "step": self.step,
            "random_key": list(self.random_key),
            "data": self.data,
            "config": self.config,
            "versions": dict(self.versions),
            "leaves": {item: [_leaf_values(leaf) for leaf in leaves] for item, leaves in self.leaves.items()},
        }
        return json.dumps({**values, "sha256": _hash_of(values)}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the step in ``folder``.

        Raises:
          CheckpointError: it is missing, damaged, or of a later format.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            expected = values.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "it is not the JSON that was written"
            raise _damaged(folder, path, reason) from None
        if _hash_of(values) != expected:
            raise _damaged(folder, path, "its contents do not fit its hash")
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {folder}: its format is {values['format']}; this version reads {FORMAT}.",
                help="read it with the version that wrote it: " + ", ".join(map(" ".join, values["versions"].items())),
            )
        if str(values["step"]) != folder.name:
            raise _damaged(folder, path, f"it is of step {values['step']}")
        leaves: dict[Item, tuple[LeafRecord, ...]] = {
            item: tuple(LeafRecord(**{**v, "keys": tuple(v["keys"]), "shape": tuple(v["shape"])}) for v in found)
            for item, found in values["leaves"].items()
        }
        return cls(
            step=values["step"], random_key=tuple(values["random_key"]), leaves=leaves, data=values["data"],
            config=values["config"], versions=values["versions"],
        )  # fmt: skip

    def all_leaves(self) -> Iterator[tuple[Item, LeafRecord]]:
        return ((item, leaf) for item in ITEMS for leaf in self.leaves[item])


def digest(value: np.ndarray) -> str:
    """SHA-256 of an array: of its dtype and shape as text, then of its bytes, rows first and the low byte first."""
    array = np.asarray(value, order="C")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    found = hashlib.sha256(f"{array.dtype.name}{list(array.shape)}".encode())
    found.update(array.reshape(-1).view(np.uint8))
    return found.hexdigest()


def _leaf_values(leaf: LeafRecord) -> dict[str, Any]:
    return {"keys": list(leaf.keys), "shape": list(leaf.shape), "dtype": leaf.dtype, "sha256": leaf.sha256}


def _hash_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _damaged(folder: Path, path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint of step {folder.name}: {path} cannot be used: {reason}.",
        help=f"go back to an earlier step (checkpoint.on_corrupt=previous), or remove {folder}.",
        step=int(folder.name),
        file=str(path),
    )
