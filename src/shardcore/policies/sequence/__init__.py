"""What the layers of a model are to a sequence that is split."""
