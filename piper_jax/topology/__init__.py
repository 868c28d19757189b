"""Physical devices as data: their blocks at each level of the network, their places in a torus. Imports no JAX."""

from piper_jax.topology.base import PhysicalDevice, Topology
from piper_jax.topology.jax_devices import topology_of
from piper_jax.topology.layout import Layout, consecutive_layout

__all__ = ["Layout", "PhysicalDevice", "Topology", "consecutive_layout", "topology_of"]
