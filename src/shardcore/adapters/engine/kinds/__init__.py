"""The tensor classes of the strategies."""
