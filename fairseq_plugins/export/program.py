"""ONNX programs, written operator by operator, and the file of the weights that they share.

N rows, K inputs, O outputs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from fairseq_plugins.backends.cpu.products import quantised

__all__ = ["Program", "Weights"]

OPSET = 18
CONTRIBUTED = "com.microsoft"  # onnxruntime's own operators
_PAGE = 4096  # in which weights are mapped into memory
_SMALL = 2048  # bytes of what is kept in the program itself


class Weights:
    """The file of the weights of all programs of a model, each of them once.

    Args:
        file: to write to.
        name: how the programs, which lie beside it, call it.
        int8: whether matrices are rounded to 255 steps for each output.
    """

    def __init__(self, file: BinaryIO, name: str, int8: bool) -> None:
        self.file, self.name, self.int8 = file, name, int8
        self._places: dict[object, int] = {}

    def tensor(self, name: str, value: np.ndarray[Any, Any]) -> TensorProto:
        """The entry of a program for this weight; it is written where it has not been before."""
        if value.nbytes <= _SMALL:
            return numpy_helper.from_array(value, name)
        content = value.tobytes()
        key = hashlib.sha256(content).digest(), value.dtype.str, value.shape
        if key not in self._places:
            self.file.write(b"\0" * (-self.file.tell() % _PAGE))
            self._places[key] = self.file.tell()
            self.file.write(content)
        tensor = TensorProto(name=name, dims=value.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        for field, text in (("location", self.name), ("offset", self._places[key]), ("length", len(content))):
            tensor.external_data.add(key=field, value=str(text))
        return tensor


class Program:
    """A program that is being written: ``program.Add(x, y)`` adds the operator, and gives the name of its result.

    Arguments are names of results, weights (tensors of torch or arrays), or numbers, which become constants.

    Args:
        weights: the model's.
    """

    shape: str  # what `by_sentence` makes of rows, (B, T)

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._numbers = itertools.count()
        self._constants: dict[object, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if operator.startswith("_"):
            raise AttributeError(operator)
        return partial(self.add, operator)

    def add(self, operator: str, *arguments: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add an operator: the name of its result, or a list of names where it has several."""
        inputs = ["" if each is None else self.value(each) for each in arguments]
        number = next(self._numbers)
        results = [f"{operator}_{number}_{place}" for place in range(outputs)]
        self._nodes.append(helper.make_node(operator, inputs, results, domain=domain, **attributes))
        return results if outputs > 1 else results[0]

    def value(self, given: Any) -> str:
        """The name of a result, a weight or a constant; equal ones have one name."""
        if isinstance(given, str):
            return given
        array = given.detach().cpu().numpy() if torch.is_tensor(given) else np.asarray(given)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        array = np.ascontiguousarray(array).reshape(array.shape)  # which makes vectors of numbers
        return self._constant((array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest()), array)

    def own(self, weight: Tensor) -> str:
        """A name that no other weight has, whatever it holds: onnxruntime may put another weight in its place."""
        return self._constant(object(), weight.cpu().contiguous().numpy())

    def _constant(self, key: object, array: np.ndarray[Any, Any]) -> str:
        if key not in self._constants:
            self._constants[key] = self.weights.tensor(f"constant_{len(self._constants)}", array)
        return self._constants[key].name

    def input(self, name: str, kind: type, shape: Iterable[str | int]) -> str:
        """What the program is given; sizes that have names may be any."""
        self._inputs.append(_described(name, kind, shape))
        return name

    def inputs(self) -> dict[str, list[str | int]]:
        """All inputs and their sizes."""
        return {
            each.name: [size.dim_param or size.dim_value for size in each.type.tensor_type.shape.dim]
            for each in self._inputs
        }

    def output(self, name: str, result: str, kind: type, shape: Iterable[str | int]) -> None:
        """What the program gives back."""
        self._nodes.append(helper.make_node("Identity", [result], [name]))
        self._outputs.append(_described(name, kind, shape))

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> str:
        """``x Wᵀ + b``, (N, K) to (N, O); in int8 x is rounded to 256 steps, for all rows together.

        Args:
            x: (N, K).
            weight: (O, K).
            bias: (O,), or None.
            shared: whether the weight is a table of `rows` too.
        """
        if not self.weights.int8:
            return self.Gemm(x, weight, *([] if bias is None else [bias]), transB=1)
        steps, scale = quantised(weight)
        # The product wants its columns; onnxruntime turns a shared one around when it reads the program.
        columns = self.Transpose(steps, perm=[1, 0]) if shared else self.own(steps.t())
        zero = self.own(torch.zeros(len(scale), dtype=torch.int8))
        return self.DynamicQuantizeMatMul(x, columns, scale, zero, bias, domain=CONTRIBUTED)

    def rows(self, table: Tensor, numbers: str) -> str:
        """Rows of a matrix, (V, K), by their numbers, of any shape: (..., K)."""
        if not self.weights.int8:
            return self.Gather(table, numbers)
        steps, scale = quantised(table)
        found = self.Cast(self.Gather(steps, numbers), to=TensorProto.FLOAT)
        return self.Mul(found, self.Gather(scale.unsqueeze(1), numbers))

    def either(self, condition: str, yes: Callable[[], list[str]], no: Callable[[], list[str]]) -> list[str]:
        """Several results, float32: of ``yes`` where the condition, one truth value, holds, else of ``no``."""
        graphs = []
        for branch in (yes, no):
            outer, self._nodes = self._nodes, []
            results = [_described(self.Identity(each), np.float32, None) for each in branch()]
            graphs.append(helper.make_graph(self._nodes, branch.__name__, [], results))
            self._nodes = outer
        return self.If(condition, outputs=len(results), then_branch=graphs[0], else_branch=graphs[1])

    def chunks(self, x: str, number: int, axis: int) -> list[str]:
        """Parts of one size, as torch's `chunk`."""
        return self.Split(x, outputs=number, axis=axis, num_outputs=number)

    def columns(self, x: str, start: int, end: int, axis: int = -1) -> str:
        """``x[..., start:end]``."""
        return self.Slice(x, [start], [end], [axis])

    def by_sentence(self, x: str, *sizes: int) -> str:
        """(N, ...) -> (B, T, ...), with T words or hypotheses of each sentence."""
        return self.Reshape(x, self.Concat(self.shape, list(sizes), axis=0))

    def heads(self, x: str, heads: int, width: int, *, columns: bool = False) -> str:
        """(N, h·v) -> (B, h, T, v), or (B, h, v, T) as columns."""
        return self.Transpose(self.by_sentence(x, heads, width), perm=[0, 2, 3, 1] if columns else [0, 2, 1, 3])

    def glu(self, x: str) -> str:
        """Half of the columns, gated by the others."""
        values, gates = self.chunks(x, 2, axis=-1)
        return self.Mul(values, self.Sigmoid(gates))

    def normalise(self, x: str, norm: nn.LayerNorm) -> str:
        """A layer's normalisation."""
        return self.LayerNormalization(x, norm.weight, norm.bias, axis=-1, epsilon=norm.eps)

    def write(self, path: Path) -> None:
        """Write the program."""
        graph = helper.make_graph(self._nodes, path.stem, self._inputs, self._outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIBUTED, 1)]
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def _described(name: str, kind: type, shape: Iterable[str | int] | None) -> onnx.ValueInfoProto:
    sizes = None if shape is None else list(shape)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), sizes)
