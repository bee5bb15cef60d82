"""Plans of operators for operands of certain forms: import `plan_task`, `run_rule` and `Task`."""
