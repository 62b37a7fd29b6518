"""What two or more stages of the pipeline share; one concept a module."""
