# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     main_language: python
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # One host or many
#
# The same cells drive one process or several. Here they run in one, with eight virtual CPU devices. As a script they run in as many as you like:
#
# ```
# piper launch -n 4 -- notebooks/04_many_hosts.py
# ```
#
# On a cluster, start the script once on each host: under Slurm with `srun python`, on a TPU pod on every worker, elsewhere with the variables
# `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` ([running on clusters](../docs/running-on-clusters.md)).

# %%
import os

DEVICES = 8
processes = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
os.environ["JAX_PLATFORMS"] = "cpu"

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import piper_jax as piper

# %% [markdown]
# ## Join the others
#
# Before JAX has devices. Alone, this does nothing and gives None.

# %%
others = piper.join_processes()
first = others is None or others.process == 0


def say(text):
    if first:
        print(text)


say(f"{jax.process_count()} process(es), {jax.device_count()} devices, {jax.local_device_count()} of them here")

# %% [markdown]
# ## A model, and a plan of one step over all devices
#
# Every process traces and plans the same. Nothing is said of processes: groups of devices are placed so that data parallelism stays inside a host and the pipeline
# crosses hosts.

# %%
WIDTH = 32


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        for layer in self.layers:
            with piper.annotate("PP"):
                x = x + jax.nn.gelu(layer(x))
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(step):
    """The whole batch, the same in every process: it depends on the step alone."""
    x = np.random.default_rng(step).normal(size=(64, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


model, optimizer = Net(nnx.Rngs(0)), optax.adamw(1e-2)
plan = piper.trace(loss_fn, model, batch_of(0), optimizer=optimizer).apply(
    piper.Strategy(data_parallel=2, pipeline_parallel=4, zero_stage=1, directives=(piper.directive("1F1B"),))
)
placed = piper.DeviceMap.of(plan, jax.devices())
say(placed)

# %% [markdown]
# ## Compile, meet, train
#
# Each process compiles the programs of its own groups; all meet at a barrier before the first transfer. `train.rows()` are the rows of the batch that
# devices of this process read: only these have to be loaded here.

# %%
train = piper.compile(plan, devices=placed)
state = train.init(model)
say(f"rows that process 0 reads: {len(train.rows())} of 64")
losses = []
for step in range(10):
    state, metrics = train.step(state, batch_of(step))
    losses.append(float(metrics["loss"]))
say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]

# %% [markdown]
# ## Save under this strategy, go on under another
#
# A checkpoint has the model's own layout: whole leaves, no stages, no shards. All processes call `save`, and the first writes. The folder has to be the same place for all.

# %%
folder = os.path.join(tempfile.gettempdir(), f"many-hosts-{os.environ.get('JAX_COORDINATOR_ADDRESS', os.getpid())}")
checkpoints = piper.Checkpointer(path=folder)
checkpoints.save(train, state, data={"step": 10})
checkpoints.wait()
if others is not None:
    others.meet("saved", 60)

other = piper.compile(
    piper.trace(loss_fn, model, batch_of(0), optimizer=optimizer).apply(
        piper.Strategy(data_parallel=4, pipeline_parallel=2, num_microbatches=4, directives=(piper.directive("ZBV"),))
    )
)
restored = checkpoints.restore(other)
state = restored.state
for step in range(restored.data["step"], 15):
    state, metrics = other.step(state, batch_of(step))
    losses.append(float(metrics["loss"]))
say(f"loss {losses[9]:.3f} -> {losses[-1]:.3f} under {other}")
assert losses[-1] < losses[0]

# %% [markdown]
# ## When something goes wrong
#
# `piper train CONFIG` adds what a job needs that nobody watches: it saves on SIGTERM and goes on when it is started again, names a process that is lost or stuck, and
# ends with an exit code that says why. From Python, `piper_jax.processes.watchdog.Watchdog` does the watching.
