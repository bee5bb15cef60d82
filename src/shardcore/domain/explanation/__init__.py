"""What a step moves between ranks, why, and what would spare it."""
