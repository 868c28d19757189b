"""Example Flax models: byte-level GPTs for NNX and Linen, written as any user would write them."""
