"""What layers are to tensor parallelism, and which of them are split together."""
