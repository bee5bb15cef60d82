"""Rules that are keyed by the paths of variables and outputs."""
