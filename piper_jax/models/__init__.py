"""Example Flax models, written as any user would write them: GPTs for NNX and Linen, a mixture of experts for NNX."""
