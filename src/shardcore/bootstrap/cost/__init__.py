"""Policy `auto` and the memory of a step: traces under several layouts, and their prices."""
