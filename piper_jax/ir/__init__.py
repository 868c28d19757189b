"""The intermediate representation: one DAG for one training step over all devices. Imports no JAX."""
