"""The folders of `tests/distributed`, and the table of them in CONTRIBUTING.md.

python -m tests.folders    # writes the table
"""

from collections.abc import Iterator
from pathlib import Path

from tests import generated

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "distributed"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- run: python -m tests.folders -->", "<!-- end of run -->"

SUBJECTS = {
    "capture": "captured steps: their numbers, what they guard, why a step is not captured",
    "checkpoints": "sharded checkpoints, their directory and lease, the command",
    "compiled": "captured steps under Inductor and as CUDA graphs",
    "cuda": "operators that have other results on CUDA, computed on the CPU",
    "data": "batches: where they come from, ranks that differ in them, the next one drawn early",
    "ends": "SIGTERM, worker processes, the first cause of an end, decisions that all ranks share",
    "engine": "plans and collectives of operators, fall-backs, reused all-gathered tensors",
    "failure": "ranks that fail, stop, wait or differ; the process group and the exchange",
    "files": "files of Keras and of callbacks, crashes, export",
    "generation": "`generate()` and `ops.while_loop`",
    "guides": "the code and the commands of README, docs and examples",
    "idioms": "what people write on tensors, past operators too; every name of `torch.Tensor`",
    "inspection": "`explain`, `verify`, the memory of tensors, warnings about rules",
    "keras_distribution": "`keras.distribution` itself; a sample of Keras' own tests",
    "launch": "ranks that a notebook starts: forked ones, new interpreters, engines",
    "layers": "layers and what is done to them: attention, RNNs, LoRA, quantization, torch modules",
    "operators": "operators on sharded tensors: their rules, numbers, views and writes",
    "passes": "what each pass does to a trace",
    "planning": "plans, policies, estimates, the command",
    "plugins": "packages that bring a strategy",
    "precision": "half precision: numbers, skipped steps, reads of the host",
    "strategies": "the contract, `install()`, strategy `manual`",
    "traffic": "collectives and bytes of a step, counted",
    "training": "`fit`, loops of your own, callbacks, variables",
}


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| folder | subject |"
    yield "|---|---|"
    for name, subject in SUBJECTS.items():
        yield f"| `{name}` | {subject} |"


if __name__ == "__main__":
    generated.write(PAGE, BEGIN, END, table())
