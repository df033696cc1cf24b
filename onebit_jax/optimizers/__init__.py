"""Optax transformations made of the means in :mod:`onebit_jax.compression`.

The family of optimizers, the rounds they have in common, and when a round is exact. No
mesh is made here, nothing is compiled, and nothing looks at a state on the host.
"""
