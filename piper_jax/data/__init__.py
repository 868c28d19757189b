"""Text as batches: files of records, tokenizers, shuffled epochs, packing, and where a run is in them.

Importing it imports no JAX; grain, which does, is imported where records are shuffled.
"""

from piper_jax.data.batches import Batch, Batches, batch_names
from piper_jax.data.opening import Data, open_data

__all__ = ["Batch", "Batches", "Data", "batch_names", "open_data"]
