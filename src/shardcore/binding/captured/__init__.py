"""Steps that run from a recording: the controller, its guards, and what the ranks agree on."""
