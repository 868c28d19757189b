"""Logical devices on physical ones, chosen by the links between them. Imports no JAX."""

from piper_jax.device_map.base import DeviceMap
from piper_jax.device_map.crossings import Crossing

__all__ = ["Crossing", "DeviceMap"]
