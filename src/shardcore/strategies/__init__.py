"""The built-in strategies. They depend on ports only, and not on each other.

`builtin_plugins` imports `sharded.ShardedStrategy` and `single_device.SingleDeviceStrategy`.
"""
