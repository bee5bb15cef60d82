"""Trains a small decoder to write like the documentation of Python, byte by byte.

python examples/train.py                                      one device
torchrun --nproc_per_node=2 examples/train.py --mesh 1 2      tensor parallel
torchrun --nproc_per_node=2 examples/train.py --mesh 2 1      data parallel
"""

import argparse
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported
import keras
import measure
from decoder import decoder
from text import windows

import shardcore

# Megatron's rules: attention heads and hidden units are sharded over the axis "model".
RULES = {
    ".*/(query|key|value)/kernel": (None, "model", None),
    ".*/(query|key|value)/bias": ("model", None),
    ".*/attention_output/kernel": ("model", None, None),
    ".*/expand/kernel": (None, "model"),
    ".*/expand/bias": ("model",),
    ".*/contract/kernel": ("model", None),
}


def distribute(shape):
    """Distributes all that is built after it over a mesh of all devices; by default a row."""
    shardcore.install()
    shape = shape or (1, keras.distribution.get_device_count())
    rules = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ("data", "model")))
    for path, axes in RULES.items():
        rules[path] = axes
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--mesh", type=int, nargs=2, metavar=("DATA", "MODEL"))
parser.add_argument("--plain", action="store_true", help="Keras alone, shardcore not installed")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--windows", type=int, default=768, help="how many, of 64 bytes each")
parser.add_argument("--report", metavar="FOLDER", help="write there what the demo compares")
options = parser.parse_args()

keras.utils.set_random_seed(1)
if not options.plain:
    distribute(options.mesh)
x, y = windows(options.windows, length=64)
model = decoder(length=64)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
shown = "auto" if sys.stdout.isatty() else 2  # a bar, or a line per epoch
history = model.fit(x, y, batch_size=32, epochs=options.epochs, verbose=shown)
if options.report:
    measure.report(model, history, x[:32], y[:32], options.report)
