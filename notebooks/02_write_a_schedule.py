# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Write a schedule, see it, trust it, run it
#
# A schedule is a function from plan to plan: it cuts, splits, places and orders. Here: 1F1B whose last stages push the weight half
# of their backward passes (BW) into the cooldown, where they would idle.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp
import numpy as np
import optax

import piper_jax as piper
from piper_jax import where
from piper_jax.visualization import grid_text

# %% [markdown]
# ## A small model
#
# Any pytree of parameters will do.


# %%
def loss_fn(params, batch):
    x = batch["x"]
    for weight in params:
        with piper.annotate("PP"):
            x = x + jnp.tanh(x @ weight)
    return jnp.mean((x - batch["y"]) ** 2)


rng = np.random.default_rng(0)
params = [jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32) for _ in range(8)]
batch = {name: rng.normal(size=(32, 16)).astype(np.float32) for name in ("x", "y")}
traced = piper.trace(loss_fn, params, batch, optimizer=optax.adam(1e-2))

# %% [markdown]
# ## The schedule
#
# Naming `BI` and `BW` in an order splits that backward: BI gives the cotangent that the stage before is waiting for, BW the
# gradients, which nobody waits for.


# %%
@piper.strategy("LateWeights")
def late_weights(plan, options):
    """1F1B in which stage s holds back the weight gradients of its last s microbatches until its cooldown."""
    stages, count = options.pipeline_parallel, options.num_microbatches
    plan = plan.cut(stages=stages).split(where(), num_microbatches=count)
    slots = []
    for stage in range(stages):
        plan = plan.place(where(PP=stage), group=options.group(stage))
        at = lambda name, mb: where(PP=stage, MB=mb, PASS=name)  # noqa: B023
        warmup = min(stages - 1 - stage, count)
        slots += [at("F", mb) for mb in range(warmup)]
        for mb in range(count):
            if mb + warmup < count:
                slots.append(at("F", mb + warmup))
            slots.append(at("BI", mb))
            if mb >= stage:
                slots.append(at("BW", mb - stage))
        slots += [at("BW", mb) for mb in range(max(count - stage, 0), count)]
    return plan.order(slots)


strategy = piper.Strategy(pipeline_parallel=4, num_microbatches=8, directives=(piper.directive("LateWeights"),))
plan = traced.apply(strategy).check()
report = piper.simulate(plan, title="late weights")
print(grid_text(report))

# %% [markdown]
# The same with plain 1F1B:

# %%
plain = traced.apply(piper.Strategy(pipeline_parallel=4, num_microbatches=8))
print(grid_text(piper.simulate(plain, title="1F1B")))
report

# %% [markdown]
# ## A wrong one is refused before anything is compiled
#
# Here the first stage waits for a cotangent before it has sent the activation that it follows from.

# %%
stages = traced.cut(stages=2).split(where(), num_microbatches=2)
for stage in range(2):
    stages = stages.place(where(PP=stage), group=stage)
try:
    stages.order([where(PP=0, MB=0, PASS="B"), where(PP=0, MB=0, PASS="F")]).check()
except piper.PiperError as error:
    print(error)

# %% [markdown]
# ## Run it, and hold it against one device
#
# `bisect` runs the plan beside the plain program, compares every value between stages, every cotangent and every gradient, and names
# the first node that differs. None means that there is none.

# %%
train = piper.compile(plan)
state = train.init(params)
print("first difference:", train.bisect(state, batch))
for step in range(3):
    state, metrics = train.step(state, batch)
    print(step, float(metrics["loss"]))

# %% [markdown]
# ## Planned beside measured
#
# One step on this machine, whose cores all four groups share.

# %%
measured = train.profile(state, batch, title="measured")
print(measured)
piper.draw(report, "late_weights.svg")
