"""Train, test and predict steps, and loops outside `fit`."""
