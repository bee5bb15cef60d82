"""Rules keyed by the paths of variables and outputs: import `rules.PathRules`."""
