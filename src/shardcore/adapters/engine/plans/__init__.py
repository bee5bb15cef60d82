"""Plans of operators for operands of certain forms: import `planned`, `run_rule` and `Task`."""
