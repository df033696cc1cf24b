"""A run around an optimizer: the compiled step, checkpoints, and what watches a run.

What works on whole states, on the host. Mathematics of an optimizer does not live here.
"""
