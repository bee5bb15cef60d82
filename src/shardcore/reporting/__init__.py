"""What a person sees: results as data, the tables that show them, and the log."""
