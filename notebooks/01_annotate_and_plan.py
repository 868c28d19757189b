# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Annotate a model, plan it, look at the plan, run it
#
# Eight virtual CPU devices stand in for a small cluster. Everything up to `piper.compile` needs no device at all.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import piper_jax as piper
from piper_jax import where

# %% [markdown]
# ## A model with regions
#
# Each `with piper.annotate("PP")` is one unit of the pipeline. The class decorator carries the degrees.


# %%
@piper.annotate(data_parallel=2, pipeline_parallel=4, num_microbatches=8)
@piper.directive("1F1B")
class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 32, depth: int = 8):
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            with piper.annotate("PP"):
                x = x + jnp.tanh(layer(x))
        return self.embed.attend(x)


def loss_fn(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


model = Net(nnx.Rngs(0))
batch = {"tokens": np.random.default_rng(0).integers(0, 64, (32, 17))}
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

# %% [markdown]
# ## One global DAG
#
# `trace` computes nothing. Each unit is an operation with its module path, its line in your file and its cost; the kernel of
# the embedding is used by the first and the last unit, so it is a state bucket of its own.

# %%
traced = piper.trace(loss_fn, model, batch, optimizer=optimizer)
for op in traced.dag.ops.values():
    print(f"PP={op.PP}  {op.name:12} {op.source:24} {op.flops_forward / 1e6:6.2f} MFLOP forward   reads {op.reads}")

# %% [markdown]
# ## Directives rewrite it
#
# A strategy is a short program of directives. Printing a plan shows them, the groups, and what each group runs in order.

# %%
plan = traced.apply(piper.Strategy.of(model))
print(plan)

# %% [markdown]
# The embedding lives on the first and the last stage; `complete` derived ONE reduction of its gradient over both groups.

# %%
for node in plan.complete().nodes.values():
    if node.id.op.startswith("all_reduce"):
        print(node.group, node.axes, node.id.op)

# %% [markdown]
# ## Check, simulate, draw
#
# Mistakes are found here, not on the cluster.

# %%
plan.check()
report = piper.simulate(plan, title="1F1B")
print(report)
report

# %%
try:
    plan.order([where(PP=7, MB=0, PASS="F")])
except piper.FilterError as error:
    print(error)

# %% [markdown]
# The same model on 512 H100s, planned on this machine:

# %%
large = {"tokens": jax.ShapeDtypeStruct((4096, 17), np.int32)}
wide = piper.trace(loss_fn, model, large, optimizer=optimizer).apply(
    piper.Strategy(data_parallel=128, pipeline_parallel=4, num_microbatches=8)
)
print(piper.simulate(wide, hardware="h100", title="128 data x 4 pipeline"))

# %% [markdown]
# ## Run it
#
# The result is that of one device: the same loss, the same parameters.

# %%
train = piper.compile(plan, devices=jax.devices())
state = train.init(model)
for step in range(5):
    state, metrics = train.step(state, batch)
    print(step, float(metrics["loss"]))
print(f"{train.compiler.num_compiles} programs compiled, {train.compiler.num_shared} shared between stages")
