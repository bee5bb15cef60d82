"""WHICH layout each variable gets. Pure: a model's facts and a mesh in, specs out."""
