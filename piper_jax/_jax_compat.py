"""Everything that depends on JAX's private or moving names. No other file may import ``jax._src``."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import distributed, source_info_util
from jax._src.lib import xla_client
from jax.experimental import serialize_executable
from jax.extend import core

REMAT = frozenset({"checkpoint", "remat", "remat2"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
INLINABLE = frozenset({"jit", "pjit", "closed_call", "core_call"})
_NO_MESH = jax.sharding.AbstractMesh((), ())  # between two of different size, which JAX does not exchange
_LIBRARY_ROOTS = tuple(
    os.path.realpath(path)
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(__file__)}
)
_MODELS = os.path.join(os.path.realpath(os.path.dirname(__file__)), "models")


def inner_jaxpr(eqn: Any, *, remat: bool = False) -> Any | None:
    """The ClosedJaxpr of a call equation that can be inlined (``jax.jit``, and with ``remat`` ``jax.checkpoint``)."""
    if eqn.primitive.name in INLINABLE:
        return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if remat and eqn.primitive.name in REMAT:
        inner = eqn.params["jaxpr"]
        return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
    return None


def evaluated(eqn: Any, *, rules: bool) -> Any | None:
    """The ClosedJaxpr that a checkpoint computes, and with ``rules`` a function with a derivative of its own."""
    inner = eqn.params["call_jaxpr"] if rules and eqn.primitive.name in CUSTOM else inner_jaxpr(eqn, remat=True)
    return inner if inner is None or isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def has_mesh(eqn: Any) -> bool:
    """Whether an equation was traced under a mesh."""
    return not eqn.ctx.cur_abstract_mesh.empty


def forwarded(eqn: Any) -> dict[int, int]:
    """Results of a checkpoint or a scan that are one of its operands unchanged: position -> position of the operand.

    Flax's lifted transforms return all state that they were given; most of it is as it was.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in REMAT:
        first, last, inner = 0, len(eqn.outvars), getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    elif name == "scan":
        first, last = _scan_sizes(eqn)
        inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    else:
        return {}
    position = {v: i for i, v in enumerate(inner.invars)}
    found = {k: position[v] for k, v in enumerate(inner.outvars[:last]) if isinstance(v, core.Var) and v in position}
    return {k: i for k, i in found.items() if name != "scan" or i == first + k}


def _scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many constants and carried values a scan has. JAX 0.12.0.1 and newer keep them as trees; where these are
    not plain lists (in the derivative of a scan) nothing is taken to be carried."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, xs = (len(part.vals) for part in params["ft_in"].unpack())
    return (consts, carry) if consts + carry + xs == len(eqn.invars) else (0, 0)


@dataclass(frozen=True, slots=True)
class Scan:
    """The parts of a ``scan`` equation: its operands are constants, carried values, then arrays ``[length, ...]``."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    body: core.ClosedJaxpr


def scan_parts(eqn: Any) -> Scan | None:
    """The parts of a ``scan`` equation, None where they are not known (in the derivative of a scan)."""
    inner = eqn.params["jaxpr"]
    body = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
    consts, carry = _scan_sizes(eqn)
    if not consts + carry and "num_consts" not in eqn.params:
        return None
    return Scan(consts, carry, eqn.params["length"], eqn.params["reverse"], body)


def bind(eqn: Any, values: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """Evaluates one equation on ``values``, keeping its name stack and source line; always returns a sequence.

    Args:
      **changed: parameters that differ from the equation's own.
    """
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    here = jax.sharding.get_abstract_mesh()
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        if jax.sharding.get_abstract_mesh() == here:
            result = eqn.primitive.bind(*values, **params)
        else:  # it was traced under another mesh
            if eqn.primitive.name != "sharding_constraint" and params.get("sharding") is not None:
                params = {**params, "sharding": None}
            with jax.sharding.use_abstract_mesh(_NO_MESH), jax.sharding.use_abstract_mesh(here):
                result = eqn.primitive.bind(*values, **params)
    return result if eqn.primitive.multiple_results else (result,)


def mover(target: jax.sharding.Sharding) -> Callable[..., Sequence[jax.Array]]:
    """A function that copies arrays, each shard to its place under ``target``, as ``jax.device_put`` does.

    It goes straight to the runtime where that offers it: ``device_put`` works out the same placement on every call.
    """
    copy = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    semantics = getattr(xla_client, "ArrayCopySemantics", None)
    devices = getattr(target, "_internal_device_list", None)
    if copy is None or semantics is None or devices is None:
        return lambda *arrays: jax.device_put(list(arrays), target)

    def move(*arrays: jax.Array) -> Sequence[jax.Array]:
        count = len(arrays)
        return copy(arrays, [devices] * count, [target] * count, [semantics.REUSE_INPUT] * count)

    return move


def random_keys(words: Any, dtype: Any) -> jax.Array:
    """The random keys of a key dtype, from their words."""
    return jax.random.wrap_key_data(words, impl=dtype._impl)


def join_processes(
    address: str | None, count: int | None, number: int | None, seconds: int, on_abort: Callable[[], None]
) -> None:
    """``jax.distributed.initialize``; ``on_abort`` is called where JAX would abort the process.

    It does so, with a stack trace, once its coordination service reports an error or is gone. Another callback can be
    given to its client, but the one from Python cannot take the status that it is called with: that ends in ``abort``
    too, without a trace. So the signal of ``abort`` is caught, in C, because no Python code may be running.
    """
    library = distributed._jax
    original = library.get_distributed_runtime_client
    library.get_distributed_runtime_client = partial(original, missed_heartbeat_callback=lambda: None)
    try:
        jax.distributed.initialize(address, count, number, initialization_timeout=seconds)
    finally:
        library.get_distributed_runtime_client = original
    _KEPT.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: on_abort()))
    ctypes.CDLL(None).signal(signal.SIGABRT, _KEPT[-1])


_KEPT: list[Any] = []


def coordination_client() -> tuple[int, int, Any] | None:
    """Number of this process, how many there are, and the client of their key-value store; None where it is alone."""
    known = distributed.global_state
    if known.client is None or (known.num_processes or 1) < 2:
        return None
    return known.process_id, known.num_processes, known.client


def custom_jvp_programs(eqn: Any) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr]:
    """The function of a ``custom_jvp`` equation, and its derivative: primals, tangents -> results, their tangents."""
    inner = eqn.params["call_jaxpr"]
    primal = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
    jaxpr, consts, _ = eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * len(eqn.invars))
    return primal, core.ClosedJaxpr(jaxpr, consts)


def user_line(eqn: Any) -> str:
    """``file.py:line`` of the innermost frame in the user's own code, or an empty string."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if is_users(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return ""


def is_users(file: str) -> bool:
    """Whether a file of source is the user's own, or one of the models here."""
    path = os.path.realpath(file)
    return path.startswith(_MODELS) or not path.startswith(_LIBRARY_ROOTS)


class _Relocator(serialize_executable._JaxPjrtUnpickler):
    """Loads a serialized executable onto other devices by exchanging its device assignment."""

    def __init__(self, file: io.BytesIO, source: Sequence[Any], target: Sequence[Any]):
        super().__init__(file, target[0].client, list(target))
        self.devices_by_id = {old.id: new for old, new in zip(source, target, strict=True)}
        self._old, self._new = (_assignment([d.id for d in devices]) for devices in (source, target))
        self.relocated = False

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        if len(self._old) != len(self._new) or self._old not in pid[1]:
            raise LookupError("no device assignment to exchange")
        payload = pid[1].replace(self._old, self._new)
        executable = self.backend.deserialize_executable(payload, executable_devices=self.execution_devices)
        self.relocated = [d.id for d in executable.local_devices()] == [d.id for d in self.devices_by_id.values()]
        return executable


def _assignment(ids: Sequence[int]) -> bytes:
    return xla_client.DeviceAssignment.create(np.array([list(ids)])).serialize()


def _is_cached_on_disk() -> bool:
    """An executable that came from JAX's persistent cache has lost what it takes to serialize it once more."""
    return bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)


def can_relocate(devices: Sequence[Any]) -> bool:
    """Whether :func:`relocate` can bring executables to such devices at all."""
    return devices[0].platform == "cpu" and not _is_cached_on_disk()


def relocate(compiled: jax.stages.Compiled, source: Sequence[Any], target: Sequence[Any]) -> jax.stages.Compiled | None:
    """The same executable on other devices without compiling again, or None where the backend cannot do that.

    Args:
      compiled: an executable for exactly the devices ``source``, in that order.
      source, target: equally many devices of one process.
    """
    if compiled._params.const_args or not can_relocate(target):
        return None
    try:
        payload, in_tree, out_tree = serialize_executable.serialize(compiled)
        loader = _Relocator(io.BytesIO(payload), source, target)
        unloaded, args_info, no_kwargs = loader.load()
        if not loader.relocated:
            return None
        loaded = unloaded.load()
    except (LookupError, ValueError, NotImplementedError):
        return None
    return jax.stages.Compiled(loaded, [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def cpu_collectives() -> tuple[str, ...]:
    """What this jaxlib has for collectives between CPU processes: ``gloo``, ``mpi``."""
    return tuple(name for name in ("gloo", "mpi") if any(f"make_{name}" in made for made in dir(xla_client._xla)))
