"""A step recorded as a tape of operators on plain tensors, and run from it."""
