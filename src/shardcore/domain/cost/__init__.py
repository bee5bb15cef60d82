"""The cost of a step on a machine: traced events, collectives, and predicted seconds and memory."""
