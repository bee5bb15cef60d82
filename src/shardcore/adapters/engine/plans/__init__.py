"""What an operator does on operands of certain forms: planned once, run often."""
