"""Figures of steps: samples a second, waiting for data, memory, collectives, use of the device."""

import attrs

_MIB = 2**20
# The names of all figures in logs.
STEP_FIGURES = (
    *("samples_per_second", "tokens_per_second", "step_ms", "data_wait", "peak_memory_mib"),
    *("collective_mib", "flops_utilization"),
)


@attrs.frozen
class StepCounts:
    """The bytes that one step sends on one rank, and the operations that it computes.

    Args:
        collective_bytes: The bytes of its operands of collectives.
        flops: The floating-point operations of its products, convolutions and attention.
    """

    collective_bytes: int = 0
    flops: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(self.collective_bytes + other.collective_bytes, self.flops + other.flops)


@attrs.frozen
class StepTotals:
    """Sums over some steps.

    Args:
        steps: Their number.
        seconds: From the end of the step before them to the end of the last.
        waited: The seconds of these in which the device waited for batches.
        samples: The rows of the global batches.
        tokens: The tokens of the global batches; 0 if the inputs have none.
        collective_bytes: The bytes of this rank's operands of collectives.
        flops: The floating-point operations of this rank.
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    samples: int = 0
    tokens: int = 0
    collective_bytes: int = 0
    flops: int = 0

    def __add__(self, other: "StepTotals") -> "StepTotals":
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return StepTotals(*(own + others for own, others in pairs))

    def figures(self, peak_memory: int, peak_flops: float | None) -> dict[str, float]:
        """The means of these steps, by the names of logs.

        Args:
            peak_memory: The most bytes of memory so far.
            peak_flops: The floating-point operations of the device in a second; None if unknown.

        Example:
            >>> StepTotals(steps=2, seconds=0.5, samples=64).figures(2**20, None)["step_ms"]
            250.0
        """
        figures = {"samples_per_second": self.samples / self.seconds}
        if self.tokens:
            figures["tokens_per_second"] = self.tokens / self.seconds
        figures |= {
            "step_ms": 1000 * self.seconds / self.steps,
            "data_wait": self.waited / self.seconds,
            "peak_memory_mib": peak_memory / _MIB,
            "collective_mib": self.collective_bytes / self.steps / _MIB,
        }
        if peak_flops is not None:
            figures["flops_utilization"] = self.flops / self.seconds / peak_flops
        return figures
