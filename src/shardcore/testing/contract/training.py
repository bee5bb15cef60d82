"""The promises under Keras: the numbers of one device, its gradients and its files."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardcore.testing.contract import programs
from shardcore.testing.contract.meshes import OnMeshes, Shape
from shardcore.testing.ranks import run_ranks


@cache
def one_device(program: Callable[..., object]) -> dict[str, Any]:
    """Runs `program` in plain Keras."""
    (results,) = run_ranks(program, 1, None, (1, 1))
    assert isinstance(results, dict)
    return results


def _trains_on(shape: Shape) -> Callable[["TrainingPromises"], None]:
    """Builds the test that training on a mesh gives every number of plain Keras, on every rank."""

    def test(self: "TrainingPromises") -> None:
        if self.serves(shape):
            for rank, numbers in enumerate(_on_ranks(programs.train, self.strategy, shape)):
                self.close(numbers, one_device(programs.train), f"rank {rank}")

    return test


class TrainingPromises(OnMeshes):
    """The promises that a user sees."""

    # Relative to numbers of about one; sums over ranks are taken in another order than on one
    # device.
    tolerance: ClassVar[float] = 1e-5

    def close(self, numbers: dict[str, Any], expected: dict[str, Any], where: str) -> None:
        """Checks that the numbers of `found` are those of `expected`, within the tolerance."""
        assert numbers.keys() == expected.keys(), (
            f"{where}: {sorted(numbers)}, not {sorted(expected)}"
        )
        near = self.tolerance
        for name, value in numbers.items():
            np.testing.assert_allclose(
                value, expected[name], near, near, err_msg=f"{where}: {name}"
            )

    test_one_rank_gives_the_numbers_of_plain_keras = _trains_on((1, 1))
    test_data_parallel_gives_the_numbers_of_one_device = _trains_on((2, 1))
    test_model_parallel_gives_the_numbers_of_one_device = _trains_on((1, 2))
    test_both_at_once_give_the_numbers_of_one_device = _trains_on((2, 2))

    def test_a_gradient_arrives_in_the_layout_of_its_variable(self) -> None:
        """The gradient is summed over the batch, and adds up as on one device."""
        shape = (2, 2)
        if not self.serves(shape):
            return
        expected = one_device(programs.gradients)
        for rank, gradients in enumerate(_on_ranks(programs.gradients, self.strategy, shape)):
            assert gradients.keys() == expected.keys()
            for path, (part, pending, slices) in gradients.items():
                where = f"rank {rank}: the gradient of {path}"
                assert not pending, (
                    f"{where} has a sum pending: redistribute_gradients() must reduce it"
                )
                self.close({where: part}, {where: expected[path][slices]}, "")

    def test_a_file_is_that_of_one_device(self, tmp_path: Path) -> None:
        """Plain Keras reads what a mesh saved; both resume with the loss that would have come."""
        shape = (1, 2) if self.serves((1, 2)) else (1, 1)
        ranks = _on_ranks(programs.save, self.strategy, shape, tmp_path)
        ((loaded, plain),) = run_ranks(programs.load, 1, tmp_path)
        for rank, (weights, further, resumed) in enumerate(ranks):
            self.close(loaded, weights, f"the file, and what rank {rank} kept")
            next_losses = {"on the mesh": resumed, "in plain Keras": plain}
            self.close(next_losses, dict.fromkeys(next_losses, further), f"rank {rank}, next loss")


def _on_ranks(
    program: Callable[..., object], strategy: str, shape: Shape, *args: object
) -> list[Any]:
    return run_ranks(program, math.prod(shape), strategy, shape, *args)
