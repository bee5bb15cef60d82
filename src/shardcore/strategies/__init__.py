"""The built-in strategies. They depend on ports only, and not on each other."""
