"""The tensor classes of the strategies: import `DTensors` or `LocalShards`."""
