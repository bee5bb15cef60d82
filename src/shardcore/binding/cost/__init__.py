"""Layout maps: made by a policy, and reports of what their rules matched.

Import `plan.Plan`, `make_plan.make_plan` and `rules_report.rules_report`.
"""
