"""Facts of models, layout maps made by a policy, and reports of what their rules matched.

Import `plan.make_plan`, `plan.Plan` and `rules_report.rules_report`.
"""
