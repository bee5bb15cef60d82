"""Layout maps: made by a policy, and reports of what their rules matched."""
