"""What two or more stages of the pipeline share; one concept a module."""

import gc

# Imports of torch, vllm and speculators make a million objects that stay. To look through them each
# time that 700 more are there takes a sixth of a stage's start.
gc.set_threshold(100_000)
