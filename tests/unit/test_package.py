"""The effects of `import shardcore`."""

import subprocess
import sys


def test_import_loads_no_framework() -> None:
    program = (
        "import sys, shardcore\n"
        "print(*sorted({'torch', 'keras', 'numpy', 'rich', 'pluggy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
