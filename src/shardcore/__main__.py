"""`python -m shardcore`, and `torchrun --module shardcore` for several ranks."""

import sys

from shardcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
