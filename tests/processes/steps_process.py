"""One of several processes: takes the steps of the cases that it is given and writes what it gets to a file.

Run as ``python steps_process.py FOLDER DEVICES CASE...``; the environment says which process this is.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_SECONDS = 240


def main(folder: Path, num_devices: int, names: list[str]) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    from piper_jax.processes.requested import requested

    asked = requested()
    count, number = (asked.count or 1, asked.number or 0) if asked is not None else (1, 0)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices // count}"
    import jax

    if asked is not None:
        from piper_jax.processes.joining import join

        join(asked, start_limit=60)
    jax.config.update("jax_disable_most_optimizations", True)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "equivalence")]
    from several_cases import CASES

    for name in names:
        leaves = jax.tree.leaves(steps(CASES[name]()))
        np.savez(folder / f"{name}-{number}-of-{count}.npz", *[_numbers(leaf) for leaf in leaves])
    print("done", flush=True)


def _numbers(leaf: Any) -> np.ndarray:
    import jax

    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def steps(case: Any) -> Any:
    """Gradients, losses and metrics of three steps, an evaluation, parameters and optimizer state at the end."""
    problem, strategy = case
    train = problem.parallelize(strategy)
    state = train.init(problem.params, seed=7)
    found: list[Any] = [train.gradients(state, problem.batch)]
    for step in range(problem.steps):
        state, metrics = train.step(state, problem.batch_of(step))
        found.append(metrics)
    known = train.plan.source.state
    return [
        *found,
        train.evaluate(state, problem.batch),
        known.values(train.params(state)),
        train.opt_state(state),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
