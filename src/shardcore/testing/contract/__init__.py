"""The promises of a strategy, each of them a pytest test. It loads torch and Keras.

Example:
    Every promise is tested for the strategy that is installed as "mine" by::

        from shardcore.testing import StrategyContract

        class TestMine(StrategyContract):
            strategy = "mine"
"""

from shardcore.bootstrap import environment

environment.choose_backend()  # before the modules below import Keras

from shardcore.testing.contract.failing import FailurePromises  # noqa: E402
from shardcore.testing.contract.training import TrainingPromises  # noqa: E402
from shardcore.testing.contract.variables import VariablePromises  # noqa: E402

__all__ = ["StrategyContract"]


class StrategyContract(VariablePromises, TrainingPromises, FailurePromises):
    """Every promise of a strategy, on one, two and four real ranks of this machine.

    It takes 50 seconds of CPU time: half a minute on two idle cores. A strategy over several ranks
    brings its own tensor type; "Write a plug-in" in the documentation has a minimal one.

    Attributes:
        strategy: Its name, as `shardcore.install(strategy=...)` takes it.
        several_ranks: Whether it serves several ranks. If not, every test of several ranks checks
            that it is refused there.
        tolerance: How far numbers of training may be from those of one device, relative to numbers
            of about one. By default 1e-5, for sums in another order.

    Example:
        >>> class TestMine(StrategyContract):
        ...     strategy = "mine"
        >>> TestMine.several_ranks
        True
    """
