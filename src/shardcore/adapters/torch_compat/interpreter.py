"""Graphs of torch.fx, run by torch's interpreter in C++: one call from Python for all of them."""

import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import fx

from shardcore.domain.capture import OtherWay


class NotInterpretedError(Exception):
    """There is something in a graph that is not for the interpreter."""


@attrs.frozen(eq=False)
class Each:
    """A function that runs a graph once for each block of tensors that are cut into blocks.

    Args:
        body: The graph, for what it writes into its operands.
        cut: Which operands are lists of blocks; each run gets the others whole.
        blocks: How many blocks there are.
    """

    body: fx.GraphModule
    cut: tuple[bool, ...]
    blocks: int
    __name__ = "each"

    def __call__(self, *operands: Any) -> None:
        """Run it from Python."""
        for place in range(self.blocks):
            pairs = zip(operands, self.cut, strict=True)
            self.body.forward(*(each[place] if cut else each for each, cut in pairs))


@attrs.frozen(eq=False)
class Inlined:
    """A graph that is a function in another one.

    Args:
        module: The graph.
        name: What it is called there, for people.
    """

    module: fx.GraphModule
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *operands: Any) -> Any:
        """Run it from Python."""
        return self.module.forward(*operands)


def seeded_generator(seed: torch.Tensor) -> torch.Generator:
    """A generator with the value of `seed`, as `keras.random` makes it on torch."""
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed) & _SEED_BITS)
    return generator


_SEED_BITS = 0xFFFFFFFF


def check(tensor: torch.Tensor, number: Any) -> None:
    """Go on if `tensor` holds what it held when the step was recorded.

    Raises:
        OtherWay: If it holds another number.
    """
    if tensor.item() != number:
        raise OtherWay


def interpreted(module: fx.GraphModule) -> Callable[..., tuple[Any, ...]]:
    """`module`, which returns a tuple of tensors, as one call of the interpreter.

    torch 2.13: the interpreter is that of TorchScript, whose graphs can be made by its private
    classes alone; `torch.jit.trace` would run the step, and scripts are Python.

    Raises:
        NotInterpretedError: If it calls Python, but for what stands in this module.
    """
    builder = _Builder()
    inputs = [
        builder.graph.addInput(node.name) for node in module.graph.nodes if node.op == "placeholder"
    ]
    builder.give(builder.inlined(module, inputs))
    function = torch._C._create_function_from_graph("step", builder.graph)
    held = tuple(builder.held)

    def run(*operands: Any) -> tuple[Any, ...]:
        with _as_written(), _torchs_errors():
            made: tuple[Any, ...] = function(*operands, *held)
        return made

    return run


@contextmanager
def _as_written() -> Iterator[None]:
    """TorchScript runs a graph as it is written, call by call, below autograd.

    torch 2.13: its optimizer takes a write into the tensors of a list for no write, and leaves it
    out: `_foreach_add_` of an optimizer. It is turned on and off for the whole process. Where there
    are no gradients autograd still takes its time, and collectives have their part of it in Python.
    """
    was_on = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch._C._set_graph_executor_optimize(was_on)


@contextmanager
def _torchs_errors() -> Iterator[None]:
    """An operator that fails says what it says to Python.

    torch 2.13: the interpreter makes a `RuntimeError` of every error, and tells of itself first.
    """
    try:
        yield
    except torch.jit.Error:  # the one that a graph raises itself
        raise OtherWay from None
    except RuntimeError as error:
        text = str(error)
        if not text.startswith(_PREAMBLE):
            raise
        reason = text.rpartition("\nRuntimeError: ")[2].strip()
        kind = next((kind for words, kind in _KINDS.items() if words in reason), RuntimeError)
        raise kind(
            f"{reason} (An operator of a captured step failed. For the line of Python that called "
            "it: model.compile(jit_compile=False).)"
        ) from None


_PREAMBLE = "The following operation failed in the TorchScript interpreter."
_KINDS = {"out of memory": torch.OutOfMemoryError, "index out of range in self": IndexError}


class _Builder:
    """Writes a graph of TorchScript.

    Attributes:
        graph: That graph.
        held: The tensors of modules, its last operands.
    """

    def __init__(self) -> None:
        self.graph: Any = torch._C.Graph()
        self.held: list[torch.Tensor] = []
        self._constants: ChainMap[tuple[str, str, str], Any] = ChainMap()

    def inlined(self, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Write the calls of `module`; gives the values that it returns.

        Raises:
            NotInterpretedError: If there is something that is not for the interpreter.
        """
        known: dict[fx.Node, Any] = {}
        operands = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "output":
                return [known[each] for each in node.args[0]]
            if node.op == "placeholder":
                known[node] = next(operands)
            elif node.op == "get_attr":
                known[node] = self._holding(getattr(module, node.target))
            else:
                known[node] = self._called(node, known)
        raise AssertionError("a graph of torch.fx has an output")

    def give(self, values: Sequence[Any]) -> None:
        """Let the graph return a tuple of `values`."""
        kind = torch._C.TupleType([torch._C.TensorType.get()] * len(values))
        self.graph.registerOutput(self._made("prim::TupleConstruct", values, kind))

    def _holding(self, tensor: torch.Tensor) -> Any:
        self.held.append(tensor)
        return self.graph.addInput(f"held{len(self.held)}")

    def _called(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """What a call gives: a value, or a list of them."""
        target: Any = node.target
        operands: list[Any] = [
            known[each] if isinstance(each, fx.Node) else each for each in node.args
        ]
        if target is operator.getitem:
            return operands[0][operands[1]]
        if target == "item":
            return self._made("aten::item", operands, torch._C.NumberType.get())
        if target is seeded_generator:
            return self._seeded(operands[0])
        if target is check:
            return self._check(*operands)
        if isinstance(target, Inlined):
            return self.inlined(target.module, operands)
        if isinstance(target, Each):
            return self._loop(target, operands)
        target = _OPERATORS.get(target, target)
        if isinstance(target, torch._ops.OpOverload):
            return self._operator(target, node, known)
        raise NotInterpretedError(f"{getattr(target, '__name__', target)} is a function of Python")

    def _operator(self, target: Any, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """What an operator gives."""
        schema = target._schema
        operands = []
        for place, argument in enumerate(schema.arguments):
            given = argument.default_value
            if place < len(node.args):
                given = node.args[place]
            elif argument.name in node.kwargs:
                given = node.kwargs[argument.name]
            operands.append(self._operand(given, argument.type, known))
        made = self._inserted(schema.name, operands, [each.type for each in schema.returns])
        _check_is_same(made, schema)
        results = list(made.outputs())
        if len(results) != 1:
            return results
        if results[0].type().kind() != "ListType":
            return results[0]
        if not node.users or any(user.target is not operator.getitem for user in node.users):
            return results[0]
        kinds = [torch._C.TensorType.get()] * len(node.users)
        return list(self._inserted("prim::ListUnpack", results, kinds).outputs())

    def _operand(self, given: Any, kind: Any, known: dict[fx.Node, Any]) -> Any:
        """What is given to an operator for an argument of a kind."""
        if kind.kind() == "OptionalType" and given is not None:
            return self._operand(given, kind.getElementType(), known)
        if isinstance(given, fx.Node):
            if kind.kind() == "GeneratorType":
                known[given].setType(kind)  # an input is taken for a tensor else
            return known[given]
        if not isinstance(given, list | tuple):
            return self._constant(given, kind)
        element = kind.getElementType()
        is_known = not any(isinstance(each, fx.Node) for each in given)
        if given and is_known and not _takes_numbers(element):
            return self._constant(list(given), kind)
        operands = [self._operand(each, element, known) for each in given]
        return self._made("prim::ListConstruct", operands, kind)

    def _constant(self, value: Any, kind: Any) -> Any:
        """A value that is known, as an argument of a kind."""
        key = repr(value), type(value).__name__, str(kind)
        if key not in self._constants:
            self._constants[key] = self._known(value, kind)
        return self._constants[key]

    def _known(self, value: Any, kind: Any) -> Any:
        if _takes_numbers(kind) and isinstance(value, bool):  # as a constant it would be 0 or 1
            held = self._holding(torch.tensor(value))
            return self._made("aten::item", [held], torch._C.NumberType.get())
        try:
            made = self.graph.insertConstant(_written(value, kind))
        except TypeError:
            raise NotInterpretedError(f"{value!r} is an operand") from None
        if _takes_numbers(kind) and isinstance(value, int | float | complex):
            made.setType(torch._C.NumberType.get())
        return made

    def _seeded(self, seed: Any) -> Any:
        """What `seeded_generator` gives."""
        number, device = torch._C.IntType.get(), torch._C.DeviceObjType.get()
        bits = self._constant(_SEED_BITS, number)
        seed_number = self._made("aten::Int", [seed], number)
        operands = [
            self._made("prim::device", [seed], device),
            self._made("aten::__and__", [seed_number, bits], number),
        ]
        return self._made("aten::Generator", operands, torch._C._GeneratorType.get())

    def _check(self, tensor: Any, number: Any) -> None:
        """Write what `check` does."""
        expected = self._constant(number, torch._C.NumberType.get())
        equal = self._made("aten::eq", [tensor, expected], torch._C.TensorType.get())
        goes_on = self._made("aten::Bool", [equal], torch._C.BoolType.get())
        text = self._constant("another number was read", torch._C.StringType.get())
        message = [text, self._constant(None, torch._C.NoneType.get())]
        branch = self._inserted("prim::If", [goes_on], [])
        branch.addBlock()
        with self.graph.insert_point_guard(branch.addBlock()):
            self._inserted("prim::RaiseException", message, [])

    def _loop(self, each: Each, operands: Sequence[Any]) -> None:
        """Write a loop over blocks."""
        number = torch._C.IntType.get()
        goes_on = self._constant(True, torch._C.BoolType.get())
        loop = self._inserted("prim::Loop", [self._constant(each.blocks, number), goes_on], [])
        body = loop.addBlock()
        place = body.addInputToBlock()
        place.setType(number)
        self._constants = self._constants.new_child()
        with self.graph.insert_point_guard(body):
            kind = torch._C.TensorType.get()
            blocks = [
                self._made("aten::__getitem__", [operand, place], kind) if cut else operand
                for operand, cut in zip(operands, each.cut, strict=True)
            ]
            self.inlined(each.body, blocks)
        self._constants = self._constants.parents
        body.registerOutput(goes_on)

    def _made(self, name: str, operands: Sequence[Any], kind: Any) -> Any:
        """The one value, of a kind, that an instruction gives."""
        return self._inserted(name, operands, [kind]).output()

    def _inserted(self, name: str, operands: Sequence[Any], kinds: Sequence[Any]) -> Any:
        made = self.graph.insertNode(self.graph.create(name, list(operands), len(kinds)))
        for value, kind in zip(made.outputs(), kinds, strict=True):
            value.setType(kind)
        return made


# Functions of Python that are operators by another name.
_OPERATORS: dict[Any, Any] = {torch.nn.functional.one_hot: torch.ops.aten.one_hot.default}


def _takes_numbers(kind: Any) -> bool:
    """Whether a number may be given: where there should be a tensor, another overload takes it."""
    return kind.kind() in ("NumberType", "TensorType")


def _written(value: Any, kind: Any) -> Any:
    """`value` as an argument of a kind is written."""
    if kind.kind() == "ListType":
        return [_written(each, kind.getElementType()) for each in value]
    if isinstance(value, torch.memory_format):
        return _MEMORY_FORMATS[value]
    plain = _PLAIN.get(kind.kind())
    is_number = isinstance(value, bool | int | float)
    return plain(value) if plain is not None and is_number else value


_PLAIN = {"BoolType": bool, "IntType": int, "FloatType": float}

# torch 2.13: the numbers by which C++ knows them.
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def _check_is_same(made: Any, schema: Any) -> None:
    """The interpreter finds an overload by its operands: it is the one that was recorded.

    But for a number in a tensor's place, for which it takes the overload for numbers. torch does
    the same arithmetic there.

    Raises:
        NotInterpretedError: If it is not.
    """
    found = made.schema()
    if found == str(schema):
        return
    try:
        other = torch._C.parse_schema(found)
    except RuntimeError:
        raise NotInterpretedError(f"the interpreter does not know {schema}") from None
    pairs = [
        (one, another) for one, another in zip(schema.arguments, other.arguments, strict=False)
    ]
    same = len(schema.arguments) == len(other.arguments) and all(
        one.name == another.name
        and (str(one.type) == str(another.type) or _takes_numbers(one.type))
        for one, another in pairs
    )
    if not same:
        raise NotInterpretedError(f"the interpreter takes {found} for {schema}")
