"""Prints the GPUs of this machine and the versions of what runs there, as JSON."""

import json
import platform
from importlib.metadata import version

import torch


def main() -> None:
    """Prints one line."""
    names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if names else "none"  # type: ignore[no-untyped-call]
    found = {
        "devices": ", ".join(f"{names.count(each)} × {each}" for each in dict.fromkeys(names)),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": nccl,
        "Keras": version("keras"),
        "Python": platform.python_version(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
