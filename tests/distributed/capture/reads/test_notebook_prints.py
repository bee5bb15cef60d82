"""In a notebook `print` writes through Python code of IPython and ipykernel."""

import nbformat

from tests.distributed.launch.notebooks import execute, shown

PROGRAM = """
import os
os.environ["SHARDCORE_CAPTURE"] = "at-once"
import shardcore
shardcore.install("single")
import keras, numpy as np

class Prints(keras.layers.Layer):
    rate = 1.0
    def call(self, x):
        print("rate", self.rate)
        return x * self.rate

model = keras.Sequential([Prints()])
model.compile()
x = np.ones((4, 3), "float32")
for step in range(4):
    model.predict_on_batch(x)
"""
CHANGE = """
Prints.rate = 2.0
float(model.predict_on_batch(x).mean())
"""


def test_a_step_that_prints_is_captured(tmp_path):
    cells = map(nbformat.v4.new_code_cell, (PROGRAM, CHANGE))
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    execute(notebook, tmp_path)
    first, second = ("".join(map(shown, cell.outputs)) for cell in notebook.cells)
    assert "its prints are not repeated" in first
    assert first.count("rate 1.0") < 6  # one before the model is built, two recorded
    assert second.endswith("2.0")
