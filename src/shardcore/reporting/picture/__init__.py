"""The picture of a step, for `explain()`: import `step.svg` and `step.html`."""
