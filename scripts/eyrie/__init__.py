"""What two or more stages of the pipeline share; one concept a module."""

import gc

# Imports of vllm and speculators make a million objects that stay, and to look through them again
# each time that 700 more are there takes a fifth of the time that the imports take.
gc.set_threshold(100_000)
