"""Plans of operators for operands of certain forms: made once, run often."""
