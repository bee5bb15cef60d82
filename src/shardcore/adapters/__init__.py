"""How torch does what the ports ask for. The one private torch module is `torch_compat`."""
