"""Steps of shardcore beside steps written by hand: time, memory, growth. `python -m benchmarks`."""
