"""Reads from a compiled HLO module what one device sends when it runs once.

The text is that of `after_optimizations.txt` in XLA's dump folder: the program of one device, with
the collectives that the partitioner put in. A collective in the body of a loop counts as often as
the loop runs: the steps of a recurrent layer are one.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from attrs import field, frozen

from benchmarks.traffic.sent_bytes import Traffic, ring_bytes

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
# Other names of operators that send. XLA for CPUs emits none of them.
UNREAD = re.compile(r"(.*-start|send|recv|ragged-all-to-all|collective-broadcast)$")
_SIZES = {"pred": 1, "bf16": 2, "token": 0, "opaque": 0, "c64": 8, "c128": 16}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_CALLEES = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|true_computation|false_computation)=")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@frozen
class Instruction:
    """One line of a computation.

    Attributes:
        opcode: What it does: "all-reduce".
        result: The type of its result, as it is written.
        rest: Its operands and attributes, as they are written.
    """

    opcode: str
    result: str
    rest: str


@frozen
class Sent:
    """The bytes that a computation sends when it runs once.

    Attributes:
        by_device: Bytes.
        calls: Collectives by kind.
        at_least: Whether a loop of unknown length was counted as one turn.
    """

    by_device: Counter[int] = field(factory=Counter)
    calls: Counter[str] = field(factory=Counter)
    at_least: bool = False

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            self.by_device + other.by_device,
            self.calls + other.calls,
            self.at_least or other.at_least,
        )

    def times(self, number: int) -> "Sent":
        """Repeat it."""
        devices = Counter({device: size * number for device, size in self.by_device.items()})
        calls = Counter({kind: count * number for kind, count in self.calls.items()})
        return Sent(devices, calls, self.at_least)

    @property
    def most(self) -> int:
        """Bytes of the device that sends most."""
        return max(self.by_device.values(), default=0)


def module_traffic(text: str, devices: int) -> Traffic:
    """Compute what the device that sends most sends when a module runs once.

    Args:
        text: Of the module.
        devices: On which it runs.

    Raises:
        ValueError: For an operator that may send and is not understood.

    Example:
        >>> module_traffic('''
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
        ... }
        ... ''', 2)
        Traffic(sent=32.0, calls={'all_reduce': 1}, at_least=False)
    """
    entry, found = computations(text)

    @cache
    def total(name: str) -> Sent:
        return sum((one(each) for each in found.get(name, ())), Sent())

    def one(instruction: Instruction) -> Sent:
        if instruction.opcode in KINDS:
            return _collective(instruction, devices)
        if UNREAD.match(instruction.opcode):
            raise ValueError(f"cannot read the operator {instruction.opcode!r}")
        inner = [total(name) for name in callees(instruction)]
        if instruction.opcode == "while":
            return _loop(instruction, sum(inner, Sent()))
        if _BRANCHES.search(instruction.rest):
            return max(inner, key=lambda each: each.most)
        return sum(inner, Sent())

    sent = total(entry)
    return Traffic(float(sent.most), dict(sorted(sent.calls.items())), sent.at_least)


def computations(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """Split a module into its computations: the name of the entry, and the lines of each."""
    entry, lines = "", list[Instruction]()
    found: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif instruction := parse(line):
            lines.append(instruction)
    return entry, found


def parse(line: str) -> Instruction | None:
    """Parse an instruction; None for any other line.

    Example:
        >>> parse("  ROOT %x.1 = (f32[2]{0}, s32[]) while(%t), body=%b")
        Instruction(opcode='while', result='(f32[2]{0}, s32[])', rest='%t), body=%b')
    """
    _, is_instruction, right = line.partition(" = ")
    if not (is_instruction and line.startswith(" ")):
        return None
    end = _closing(right) if right.startswith("(") else right.index(" ")
    opcode, _, rest = right[end:].strip().partition("(")
    return Instruction(opcode, right[:end].strip(), rest)


def callees(instruction: Instruction) -> Iterator[str]:
    """Name the computations that an instruction runs.

    Example:
        >>> list(callees(Instruction("while", "s32[]", "%x), condition=%c, body=%b.1")))
        ['c', 'b.1']
        >>> list(callees(Instruction("conditional", "s32[]", "%x), branch_computations={%a, %b}")))
        ['a', 'b']
    """
    for names in _CALLEES.findall(instruction.rest):
        yield from re.findall(r"[\w.\-]+", names)


def array_bytes(result: str) -> int:
    """Add up the bytes of the arrays of a type.

    Example:
        >>> array_bytes("f32[2,3]{1,0}"), array_bytes("(bf16[4]{0}, /*index=1*/s32[], pred[3])")
        (24, 15)
    """
    return sum(
        _element_bytes(kind) * math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        for kind, dims in _ARRAY.findall(result)
    )


def group_size(rest: str, devices: int) -> int:
    """Read how many devices take part in a collective together.

    Example:
        >>> group_size("%x), replica_groups={{0,1},{2,3}}", 4)
        2
        >>> group_size("%x), replica_groups=[1,4]<=[4]", 4)
        4
        >>> group_size("%x), replica_groups=mesh['axis_0'=1,'axis_1'=2] {'axis_1'}", 2)
        2
        >>> group_size("%x), replica_groups={}", 2)
        2
    """
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=@?\w*\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "replica_groups={}" in rest or "replica_groups" not in rest:
        return devices
    raise ValueError(f"cannot read the groups of a collective: {rest[:200]}")


def _collective(instruction: Instruction, devices: int) -> Sent:
    kind, size = KINDS[instruction.opcode], array_bytes(instruction.result)
    if kind == "permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.rest.partition("pairs=")[2])
        senders = Counter(int(source) for source, target in pairs if source != target)
        return Sent(Counter({d: n * size for d, n in senders.items()}), Counter([kind]))
    ranks = group_size(instruction.rest, devices)
    if ranks == 1:
        return Sent()
    operand = {"all_gather": size / ranks, "reduce_scatter": size * ranks}.get(kind, size)
    sent = ring_bytes(kind, operand, ranks)
    return Sent(Counter(dict.fromkeys(range(devices), sent)), Counter([kind]))


def _loop(instruction: Instruction, turn: Sent) -> Sent:
    if not turn.calls:
        return Sent()
    if trips := _TRIPS.search(instruction.rest):
        return turn.times(int(trips[1]))
    return Sent(turn.by_device, turn.calls, at_least=True)


def _closing(text: str) -> int:
    """Find the end of the bracket with which a text begins."""
    depth = 0
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return at + 1
    raise ValueError(f"a bracket is not closed: {text[:200]}")


def _element_bytes(kind: str) -> int:
    if kind in _SIZES:
        return _SIZES[kind]
    bits = re.match(r"[a-z]+(\d+)", kind)
    if not bits:
        raise ValueError(f"cannot tell the size of an element of {kind}")
    return math.ceil(int(bits[1]) / 8)
