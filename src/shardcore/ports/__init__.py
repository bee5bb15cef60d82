"""What the inside needs from outside, as protocols. Adapters and plug-ins implement them."""
