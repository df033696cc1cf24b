"""From a DeepSpeed configuration to our optimizers.

The table of DeepSpeed's options and what becomes of them; no DeepSpeed is needed, and
nothing here is for any other use.
"""
