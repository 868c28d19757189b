# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A mixture of experts under DualPipeV
#
# Experts are divided over devices, and the exchange of one microbatch runs beside the compute of another. Eight virtual CPU devices:
# 2 pipeline x 2 data x 2 expert.

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
from piper_jax.ir.text import dag_text
from piper_jax.runtime.reference import reference_gradients
from piper_jax.visualization import grid_text

# %% [markdown]
# ## Mark the experts
#
# Parameters of the experts are stacked, `[experts, ...]`, and `piper.expert_region` is around what each does to its own tokens,
# `[experts, capacity, dim]`. Routing stays outside: it is part of the layer, on the device that has the tokens. Each token goes to one
# expert, and what finds no place keeps its residual stream.

# %%
WIDTH, HIDDEN, EXPERTS, CAPACITY = 32, 64, 4, 16


class Mixture(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)) / WIDTH**0.5)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)) / HIDDEN**0.5)

    def __call__(self, x):
        probabilities = jax.nn.softmax(self.router(x))
        chosen = jax.nn.one_hot(probabilities.argmax(-1), EXPERTS)  # [tokens, experts]
        position = (jnp.cumsum(chosen, 0) - 1).astype(int)
        places = chosen[..., None] * jax.nn.one_hot(position, CAPACITY)  # [tokens, experts, capacity]
        sent = jnp.einsum("tec,td->ecd", places, x)
        done = piper.expert_region(lambda y: jax.nn.gelu(y @ self.up[...]) @ self.down[...])(sent)
        share, mean = piper.mean_over_replicas((chosen.mean(0), probabilities.mean(0)))
        return jnp.einsum("tec,te,ecd->td", places, probabilities, done), EXPERTS * (share * mean).sum(), chosen.sum(0)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Mixture(rngs) for _ in range(4)])

    def __call__(self, x):
        balance, loads = 0.0, []
        for layer in self.layers:
            with piper.annotate("PP"):
                y, of_layer, load = layer(x)
                x, balance, loads = x + y, balance + of_layer, [*loads, piper.Sum(load)]
        return x, balance, loads


def loss_fn(model, batch):
    y, balance, loads = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + 0.1 * balance, {"balance": balance / 4, "load": loads}


# %% [markdown]
# The tokens are of four kinds of unequal number, so a router that is left to itself keeps some experts idle.

# %%
rng = np.random.default_rng(0)
kinds = rng.choice(4, size=512, p=[0.55, 0.25, 0.15, 0.05])
x = rng.normal(size=(4, WIDTH))[kinds] + 0.5 * rng.normal(size=(512, WIDTH))
batch = {"x": x.astype(np.float32), "y": np.sin(2 * x).astype(np.float32)}
model = Net(nnx.Rngs(0))
traced = piper.trace(loss_fn, model, batch, optimizer=optax.adam(3e-3))

# %% [markdown]
# ## Plan it
#
# `expert_parallel=2` gives each device half of the experts of its stages. Their regions become units of their own (`EP=0, 1, ...`),
# and on both sides of each is an all_to_all, in both passes. Nobody wrote them: they follow from who owns what. (There are 60 and not
# 4 x 4 x 4: what enters the first layer is data, whose gradient nobody wants.)

# %%
degrees = {"data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2, "num_microbatches": 4}
plan = traced.apply(piper.Strategy(**degrees, directives=(piper.directive("DualPipeV"),))).check()
print(plan)

# %%
text = dag_text(plan.complete())
print("\n".join(line for line in text.splitlines() if "all_to_all" in line and "EP=1,MB=0]" in line))

# %% [markdown]
# ## One overlap slot
#
# A slot with a forward and a backward is one program. The two take turns, so that beside each all_to_all there is work of the other,
# which does not wait for it. The compiler does the rest ([how much it hides](../docs/overlap.md)).

# %%
slots = text.replace("\n    with", "|    with").splitlines()
print(next(slot for slot in slots if "with F[" in slot and "with B[" in slot).replace("|", "\n"))

# %% [markdown]
# ## Beside 1F1B
#
# This model is far too small for an accelerator, so here are four layers of the preset with 1.1 billion parameters at the peak rates of
# H100s; only shapes are traced. The vocabulary is cut: a head for 151,936 words takes longer than four such layers, and no schedule
# helps the rank that has it. What DualPipeV gains here is its smaller bubble. Pairs by themselves gain nothing: at these rates the
# exchange over NVLink is short, and a pair has no result for the next stage before both of its passes are done.

# %%
from piper_jax.models import moe

large = moe.language_model(preset="1B", num_layers=4, vocab_size=4096)
tokens = jax.ShapeDtypeStruct((32, 1024), np.int32)
shapes = piper.trace(large.loss_fn, large.shapes(), {"tokens": tokens, "targets": tokens}, optimizer=optax.adam(3e-3))
schedules = {
    "1F1B": piper.directive("1F1B"),
    "DualPipeV without pairs": piper.directive("DualPipeV", communication_overlap=False),
    "DualPipeV": piper.directive("DualPipeV"),
}
for name, schedule in schedules.items():
    report = piper.simulate(shapes.apply(piper.Strategy(**degrees, directives=(schedule,))), hardware="h100")
    print(f"{name:24} {1e3 * report.makespan:5.1f} ms, idle {report.bubble:.1%}")

# %% [markdown]
# The small one in ticks, and as a picture:

# %%
report = piper.simulate(plan, title="DualPipeV")
print(grid_text(report))
report

# %% [markdown]
# ## A step is that of one device
#
# The reference is the definition of a step, on one device and without any plan: the mean over slices. `piper check` does the same for
# a configuration, and `train.bisect` finds the first node that differs.

# %%
train = piper.compile(plan)
state = train.init(model)
found = train.gradients(state, batch)
loss, expected = reference_gradients(loss_fn, model, batch, num_microbatches=4, num_replicas=4)
pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
worst = max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)
assert worst < 2e-5
print(f"largest difference of any gradient: {worst:.1e} of its largest element")
# %% [markdown]
# ## Train, and look at the balance
#
# 1 is where all experts are used alike.

# %%
for step in range(31):
    state, metrics = train.step(state, batch)
    if step % 10 == 0:
        loads = np.stack([np.asarray(load) for load in metrics["load"]])
        print(f"step {step:2}  loss {float(metrics['loss']):.3f}  balance {float(metrics['balance']):.3f}  "
              f"busiest expert {(loads.max(1) / loads.mean(1)).max():.2f} of an equal share")
print(loads.astype(int))
