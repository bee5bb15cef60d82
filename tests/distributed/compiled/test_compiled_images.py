"""A step that Inductor compiles keeps the memory format of images and pools them by tiles."""

import re

import keras
import torch

from shardcore.testing import run_ranks
from tests.distributed.programs import needs_compiler


@needs_compiler
def test_a_compiled_step_converts_no_image_to_another_memory_format():
    """Every result has its channels last, and no gradient is added up by index."""

    def program(rank):
        from torch._inductor.utils import run_and_get_code

        import shardcore

        shardcore.install("single")
        images = keras.Input((16, 16, 3))
        x = keras.layers.Conv2D(32, 3, padding="same", name="conv")(images)
        x = keras.layers.MaxPooling2D(name="tiles")(keras.ops.relu(x))
        x = keras.layers.Conv2D(32, 3, padding="same", name="last")(x)
        model = keras.Model(images, keras.layers.GlobalAveragePooling2D()(x))
        model.compile("sgd", "mse", jit_compile=True)
        x, y = torch.randn(8, 16, 16, 3), torch.randn(8, 32)

        def train():
            for _ in range(3):
                model.train_on_batch(x, y)

        return run_and_get_code(train)[1]

    ((code,),) = run_ranks(program, 1, timeout=300)
    laid = re.findall(r"empty_strided_cpu\(\(8, (.*?)\), \((.*?)\), torch.float32\)", code)
    assert ("16, 16, 32", "8192, 512, 32, 1") in laid
    assert {strides for shape, strides in laid if shape == "16, 16, 32"} == {"8192, 512, 32, 1"}
    assert "atomic_add(" not in code
