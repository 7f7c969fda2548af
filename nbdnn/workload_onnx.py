"""The layers of an ONNX model: each node that nbdnn has a function for, by the node's name or its first output's.

Shapes are those of onnx's shape inference: weights that lie in other files need not be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbdnn.errors import InvalidProblem
from nbdnn.workload_onnx_nodes import READERS, RNN_MODES, Node, Value
from nbdnn.workloads import Layer, merged, with_gradients

SUFFIX = ".onnx"
_ONNX_DOMAINS = ("", "ai.onnx")


def read(
    path: Path, batch: int | None = None, dtype: str | None = None, layout: str = "nchw", *, train: bool = False
) -> tuple[list[Layer], Counter[str]]:
    """(different problems in the order of the nodes, how many nodes are none by op and reason).

    Parameters
    ----------
    batch
        Images; None: as many as the model says, 1 where it leaves that open.
    dtype
        Of every operand; None: the node's own.
    layout
        'nchw' or 'nhwc', whatever the model has; 'ncdhw' and 'ndhwc' where it has three spatial axes.
    train
        As of `nbdnn.workloads.workload`. Dropout is nothing to compute elsewhere.

    Raises
    ------
    ImportError
        The package onnx is not there.
    InvalidProblem
        The file is no model, an input leaves an extent open that is not the batch's, or no node is a problem.
    """
    graph, opset = _inferred(path, batch)
    values = _values(graph)
    forward: list[Layer] = []
    skipped: Counter[str] = Counter()
    for proto in graph.node:
        if proto.domain not in _ONNX_DOMAINS:
            skipped[f"{proto.domain}.{proto.op_type}"] += 1
        elif proto.op_type not in READERS:
            skipped[proto.op_type] += 1
        elif train or proto.op_type != "Dropout":
            try:
                problem = READERS[proto.op_type](Node(proto, _attributes(proto), values, opset, dtype, layout, train))
            except ValueError as error:  # InvalidProblem, or attributes that do not go together
                skipped[f"{proto.op_type} ({error})"] += 1
            else:
                forward.append(Layer(problem, proto.name or proto.output[0], 1))
    if not forward:
        found = f": {listed(skipped)}" if skipped else ""
        raise InvalidProblem(f"{path} has no node that nbdnn has a function for{found}")
    return merged(with_gradients(forward) if train else forward), skipped


def listed(skipped: Counter[str]) -> str:
    """What `read` skipped, the most frequent first."""
    return ", ".join(f"{count} {what}" for what, count in skipped.most_common())


def _inferred(path: Path, batch: int | None) -> tuple[Any, int]:
    """(graph, version of the operators) with a type for every value that onnx can tell."""
    try:
        import onnx
        import onnx.inliner
        from google.protobuf.message import DecodeError
    except ModuleNotFoundError as error:
        raise ImportError(f"{path} takes the package {error.name} to read: pip install 'nbdnn[onnx]'") from None
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        model = None
    if model is None or not model.HasField("graph"):  # an empty file is a model without one
        raise InvalidProblem(f"{path} is not an ONNX model")
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _set_batch(path, model.graph, batch)
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise InvalidProblem(f"{path}: {error}") from None
    versions = [each.version for each in model.opset_import if each.domain in _ONNX_DOMAINS]
    return model.graph, max(versions, default=1)


def _set_batch(path: Path, graph: Any, batch: int | None) -> None:
    """Close the batch axis of every input, and axes of its name; a `batch` also replaces the first input's, and that of
    inputs that agree with it."""
    weights = {each.name for each in graph.initializer} | {each.values.name for each in graph.sparse_initializer}
    inputs = [each for each in graph.input if each.name not in weights and each.type.HasField("tensor_type")]
    steps_first = set(_steps_first(graph))
    for each in inputs:
        if not each.type.tensor_type.HasField("shape"):
            raise InvalidProblem(f"{path}: input {each.name!r} has no shape")
    dims = {(each.name, axis): dim for each in inputs for axis, dim in enumerate(each.type.tensor_type.shape.dim)}
    of_batch = {at: dim for at, dim in dims.items() if at[1] == (at[0] in steps_first)}
    first = next((dim.dim_value for dim in of_batch.values()), 0)
    names = {dim.dim_param for dim in of_batch.values()} - {""}
    for (name, axis), dim in dims.items():
        is_open, is_batch = dim.dim_value < 1, (name, axis) in of_batch
        if is_open and not is_batch and dim.dim_param not in names:
            symbol = f" ({dim.dim_param!r})" if dim.dim_param else ""
            raise InvalidProblem(f"{path}: input {name!r} leaves the extent of axis {axis}{symbol} open")
        if is_open or (is_batch and batch and dim.dim_value == first):
            dim.dim_value = batch or 1
    if batch:  # what was inferred for another one
        del graph.value_info[:]
        for each in graph.output:
            if each.type.HasField("tensor_type"):
                each.type.tensor_type.ClearField("shape")


def _steps_first(graph: Any) -> Iterator[str]:
    """Values of recurrent nodes, x and the initial states, whose batch is their second axis."""
    for node in graph.node:
        if node.op_type in RNN_MODES and not _attributes(node).get("layout", 0):
            yield from (*node.input[:1], *node.input[5:7])


def _values(graph: Any) -> dict[str, Value]:
    """Every tensor of a graph whose shapes were inferred."""
    from onnx import TensorProto

    found: dict[str, Value] = {}
    for each in (*graph.input, *graph.value_info, *graph.output):
        tensor = each.type.tensor_type
        is_known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
        shape = tuple(dim.dim_value for dim in tensor.shape.dim) if is_known else None
        found[each.name] = Value(TensorProto.DataType.Name(tensor.elem_type), shape)
    for each in graph.initializer:
        found[each.name] = Value(TensorProto.DataType.Name(each.data_type), tuple(each.dims))
    return found


def _attributes(proto: Any) -> dict[str, Any]:
    """A node's attributes as ints, floats, strings and lists of them."""
    from onnx.helper import get_attribute_value

    def text(value: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else value

    found = {each.name: get_attribute_value(each) for each in proto.attribute}
    return {name: [text(v) for v in value] if isinstance(value, list) else text(value) for name, value in found.items()}
