"""The functions of `shardcore` on variables, tensors and torch modules.

The examples have the model of `shardcore.api`.
"""

from typing import TYPE_CHECKING, Any

from shardcore import bootstrap
from shardcore.domain.layouts.placements import ReduceOp
from shardcore.ports.types import (
    Array,
    KerasLayer,
    KerasModel,
    KerasModelT,
    KerasVariable,
    KerasVariableT,
    LayoutLike,
    MeshLike,
    RulesLike,
    TorchModuleT,
)

if TYPE_CHECKING:
    from shardcore.binding.functions import Functions, Tensor


def distribute_variable(
    variable: KerasVariableT, layout: LayoutLike | None = None
) -> KerasVariableT:
    """Redistributes a Keras variable, such as one created before the distribution was set.

    All ranks call it; all take the value of rank 0.

    Args:
        variable: The Keras variable. It is changed in place.
        layout: A `TensorLayout` or a tuple of axis names, one entry per dim; by default the
            layout that the distribution gives.

    Returns:
        The variable.

    Raises:
        LayoutError: If the layout does not fit the variable.
        CallProblem: If no distribution is set.

    Example:
        >>> shardcore.distribute_variable(model.weights[0], ("model", None)).path
        'net/hidden/kernel'
    """
    _functions().distribute_variable(variable, layout)
    return variable


def distribute_model(model: KerasModelT) -> KerasModelT:
    """Lays a model out by the distribution that is set, with its optimizer and metrics.

    A model that was made before the distribution needs no call: it is laid out at its first use.
    This moves one that was laid out under another distribution. All ranks call it; the full value
    of one variable at a time is all-gathered.

    Args:
        model: The Keras model. Its variables are changed in place.

    Returns:
        The model.

    Raises:
        RankMismatchError: If a variable without a layout has other values on another rank.
        CallProblem: If no distribution is set.

    Example:
        >>> shardcore.distribute_model(model).weights[0].path
        'net/hidden/kernel'
    """
    _functions().distribute_model(model)
    return model


def resize(
    layer: KerasLayer,
    vocabulary: int,
    initializer: object = None,
    *,
    model: KerasModel | None = None,
) -> None:
    """Grows or shrinks the vocabulary of an embedding or of a head, in place. All ranks call it.

    Rows of old tokens stay to the bit. All ranks take the new rows that rank 0 draws. Variables are
    laid out again by their rules; the full value of one at a time is all-gathered.

    Args:
        layer: A built `Embedding`, `ReversibleEmbedding` with its own or tied reverse matrix, or
            `Dense`, whose units are the vocabulary.
        vocabulary: The new number of tokens.
        initializer: Draws the new rows, by default that of the layer. A bias takes its own.
        model: The compiled model: the slots of its optimizer are resized too, with zeros for new
            rows, and a `vocabulary_size` in its configuration is set. Without it compile again.

    Raises:
        ArgumentProblem: If the layer has no vocabulary, or its size is not a number of tokens.
        CallProblem: If the layer is not built, is quantized or LoRA-enabled, or the optimizer has
            slots of other shapes.
        RankMismatchError: If a rank does not call it, or with another size.

    Example:
        >>> words = keras.layers.Embedding(10, 4)
        >>> words.build()
        >>> shardcore.resize(words, 12)
        >>> words.embeddings.shape, words.input_dim
        ((12, 4), 12)
    """
    from shardcore.binding.vocabulary import Vocabulary

    sessions = bootstrap.installation().binding.sessions
    Vocabulary(sessions).resize(layer, vocabulary, initializer, model)


def distribute_tensor(tensor: Array, layout: LayoutLike) -> "Tensor":
    """Returns `tensor` in `layout`, differentiable. All ranks call it.

    Args:
        tensor: A tensor or array. A plain one is equal on all ranks.
        layout: A `TensorLayout` or a tuple of axis names, one entry per dim.

    Raises:
        LayoutError: If the layout does not fit the tensor.
        CallProblem: If no distribution is set.

    Example:
        >>> shardcore.distribute_tensor(x, ("data", None)).shape  # the global shape
        torch.Size([16, 8])
    """
    return _functions().distribute_tensor(tensor, layout)


def all_gather_variable(variable: KerasVariable) -> "Tensor":
    """Returns the full tensor of a Keras variable, plain, on every rank. All ranks call it.

    Args:
        variable: The Keras variable.

    Example:
        >>> shardcore.all_gather_variable(model.weights[0]).shape
        torch.Size([8, 4])
    """
    return _functions().all_gather_variable(variable)


def all_reduce(tensor: Array, op: ReduceOp = "sum", axis_name: str | None = None) -> "Tensor":
    """Returns the reduction of the ranks' tensors along a mesh axis. All ranks call it.

    Args:
        tensor: The plain tensor of this rank; all ranks have the same shape.
        op: "sum", "avg", "max", "min" or "product".
        axis_name: The mesh axis, by default all of them.

    Raises:
        LayoutError: If the tensor is sharded.
        MeshError: If the mesh has no such axis.
        RankMismatchError: If another rank makes another call, or gives another shape or dtype.

    Example:
        >>> bool((shardcore.all_reduce(x, axis_name="data") == x).all())  # one rank: the same
        True
    """
    return _functions().all_reduce(tensor, op, axis_name)


def all_gather(tensor: Array, axis: int = 0, axis_name: str | None = None) -> "Tensor":
    """Returns the ranks' tensors along a mesh axis, joined at dim `axis`. All ranks call it.

    Args:
        tensor: The plain tensor of this rank; all ranks have the same shape.
        axis: The tensor dim to concatenate along.
        axis_name: The mesh axis, by default all of them.

    Raises:
        LayoutError: If the tensor is sharded, or has no such dim.
        MeshError: If the mesh has no such axis.
        RankMismatchError: If another rank makes another call, or gives another shape or dtype.

    Example:
        >>> shardcore.all_gather(x, axis=1).shape  # (16, 8 * ranks)
        torch.Size([16, 8])
    """
    return _functions().all_gather(tensor, axis, axis_name)


def ensure_dtensor(tensor: Array, layout: LayoutLike | None = None) -> "Tensor":
    """Returns `tensor` as a sharded tensor of the strategy, by default replicated.

    On a mesh of one device it returns a plain tensor.

    Args:
        tensor: A tensor or array. A plain one is equal on all ranks.
        layout: A `TensorLayout` or a tuple of axis names, one entry per dim.

    Raises:
        LayoutError: If the layout does not fit the tensor.

    Example:
        >>> shardcore.ensure_dtensor(x).shape
        torch.Size([16, 8])
    """
    return _functions().ensure_dtensor(tensor, layout)


def ensure_dtensor_input(data: object) -> Any:
    """Returns a batch, sharded over the batch axis as `fit` does.

    Args:
        data: The global batch: any nest of arrays and tensors whose first dim is the batch.

    Example:
        >>> [tensor.shape for tensor in shardcore.ensure_dtensor_input((x, y))]
        [torch.Size([16, 8]), torch.Size([16, 4])]
    """
    return _functions().ensure_dtensor_input(data)


def parallelize_torch_module(
    module: TorchModuleT, mesh: MeshLike, rules: RulesLike
) -> TorchModuleT:
    """Shards a torch module in place by rules, as torch's `parallelize_module` does.

    All ranks call it, under a distribution; all take the values of rank 0. A key of a rule matches
    the module's parameter names ("encoder.0.weight") as a key of a layout map matches paths.
    Parameters without a rule, and buffers, are replicated. At the edge of every submodule plain
    tensors become replicated ones, and partial sums are reduced. A key that ends in ".output"
    sets the layout at that edge. Wrap the module in `keras.layers.TorchModuleWrapper` afterwards;
    it keeps its layouts.

    Args:
        module: A `torch.nn.Module`.
        mesh: The mesh of the distribution that is set: the Keras `DeviceMesh`, the
            `shardcore.domain.layouts.mesh.Mesh` or the torch `DeviceMesh`.
        rules: A `LayoutMap`, a dict or pairs: keys, and a `TensorLayout` or a tuple of axis
            names, one entry per dim.

    Returns:
        The module. Make an optimizer of `torch.optim` after it: the parameters are new.

    Raises:
        RuleError: If a rule matches nothing, or two rules match one parameter.
        LayoutError: If a layout does not fit its parameter or the mesh.
        MeshError: If `mesh` is not that of the distribution.
        ArgumentProblem: If it is no module, or is sharded already.
        CallProblem: If no distribution is set.

    Example:
        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        >>> rules = {"0.weight": ("model", None), "1.weight": (None, "model")}
        >>> shardcore.parallelize_torch_module(module, mesh, rules) is module
        True
    """
    from shardcore.binding import torch_modules

    torch_modules.parallelize(module, mesh, rules, bootstrap.installation().binding.sessions)
    return module


def mesh_info() -> dict[str, Any]:
    """Returns `shape`, `axis_names` and `devices` of the mesh of the distribution that is set.

    Example:
        >>> shardcore.mesh_info()["axis_names"]
        ('data', 'model')
    """
    return _functions().mesh_info()


def _functions() -> "Functions":
    from shardcore.binding.functions import Functions

    return Functions(bootstrap.installation().binding.sessions)
