"""ONNX programs, written operator by operator, and the file of the weights that they share.

N rows, K inputs, O outputs.  B sentences of S words, k hypotheses (rows) for each, R = B·k; h heads of width v, P
places of earlier keys.
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

from fairseq_plugins.cpu.products import quantised

OPSET = 18
CONTRIBUTED = "com.microsoft"  # onnxruntime's own operators
_PAGE = 4096  # weights are mapped into memory in pages
_SMALL = 2048  # bytes; smaller weights are kept in the program itself

Sizes = list[str | int]  # of a tensor


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
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None if shape is None else list(shape)
    )


class SourceProgram(Program):
    """The program that encodes the source and computes what steps need of it; padded on the right.

    Args:
        weights: as of `Program`.
        pad: the padding symbol.
        eos: the end of a sentence.
    """

    def __init__(self, weights: Weights, pad: int, eos: int) -> None:
        super().__init__(weights)
        self.words = self.input("words", np.int64, ["B", "S"])
        is_token = self.Not(self.Equal(self.words, pad))  # (B, S)
        self.shape = self.Shape(self.words)
        _, self.length = self.chunks(self.shape, 2, axis=0)
        self.mask = self.Unsqueeze(self.Cast(is_token, to=TensorProto.FLOAT), [2])  # (B, S, 1)
        self.lengths = self.ReduceSum(self.Cast(is_token, to=TensorProto.INT32), [1], keepdims=0)  # (B,), for LSTMs
        self.bias = self._bias(is_token)  # added to scores of attention, (B, 1, S)
        self.only_words = self._bias(self.And(is_token, self.Not(self.Equal(self.words, eos))))

    def _bias(self, seen: str) -> str:
        return self.Unsqueeze(self.Where(seen, 0.0, -np.inf), [1])

    def flat(self, x: str, width: int) -> str:
        """(B, S, width) -> (N, width)."""
        return self.Reshape(x, [-1, width])

    def transposed(self, x: str) -> str:
        """(B, S, width) -> (B, width, S), or back."""
        return self.Transpose(x, perm=[0, 2, 1])

    def windows(self, x: str, width: int, padding: tuple[int, int]) -> str:
        """Each input beside its neighbours, zeros outside the sentence: (N, width) -> (N, w·width)."""
        x = self.Mul(self.by_sentence(x, width), self.mask)
        if sum(padding):
            before, after = padding
            x = self.Pad(x, [0, before, 0, 0, after, 0])
            shifted = [self.Slice(x, [start], self.Add(self.length, [start]), [1]) for start in range(1 + sum(padding))]
            x = self.Concat(*shifted, axis=2)
        return self.flat(x, width * (1 + sum(padding)))


class StepProgram(Program):
    """The program of a decoding step.

    The inputs of the source have one entry for each sentence and never change.  Rows of a state are re-ordered at the
    start of the step; keys and values of earlier steps never move, and the caller says by a bias which of them a row
    attends to.

    Args:
        weights: as of `Program`.
        sources: sizes of what it is given of the source, last of what is added to attention for it to be to words.

    Attributes:
        states: widths of those that are re-ordered, by their names.
    """

    def __init__(self, weights: Weights, sources: list[Sizes]) -> None:
        super().__init__(weights)
        self.tokens = self.input("tokens", np.int64, ["R"])
        self.position = self.input("position", np.int64, [1])
        given = [self.input(f"source{n}", np.float32, sizes) for n, sizes in enumerate(sources)]
        *self.sources, self.only_words = given
        self.shape = self.Concat(self.columns(self.Shape(self.sources[0]), 0, 1), [-1], axis=0)  # (B, k)
        self.states: dict[str, int] = {}
        self._attending = 0  # layers so far that attend to earlier steps
        self._order = ""
        self._past_bias = ""

    def state(self, width: int) -> str:
        """Another state, (before, width), in the order of the step before, to be `reordered`."""
        if not self.states:
            self._order = self.input("order", np.int64, ["R"])
        name = self.input(f"state{len(self.states)}", np.float32, ["before", width])
        self.states[name] = width
        return name

    def reordered(self, state: str) -> str:
        """(before, width) -> (R, width)."""
        return self.Gather(state, self._order, axis=0)

    def keep(self, state: str, after: str) -> None:
        """What a state is after the step, (R, width)."""
        self.output(state.replace("state", "next"), after, np.float32, ["R", self.states[state]])

    def attend_to_past(self, q: str, keys_values: str, heads: int, width: int) -> str:
        """Attend to the keys and values of earlier steps and of this one, (R, 2·h·v): (B, h, k, v) -> (B, h, k, v)."""
        n = self._attending
        if not n:
            self._past_bias = self.input("past", np.float32, ["B", 1, "k", "P"])
        self._attending += 1
        past_keys = self.input(f"keys{n}", np.float32, ["B", heads, "P", width])
        past_values = self.input(f"values{n}", np.float32, ["B", heads, "P", width])
        self.output(f"new{n}", keys_values, np.float32, ["R", 2 * heads * width])
        key, value = (self.heads(part, heads, width) for part in self.chunks(keys_values, 2, axis=1))
        own = self.ReduceSum(self.Mul(q, key), [3], keepdims=1)
        past = self.FusedMatMul(q, past_keys, transB=1, domain=CONTRIBUTED)
        scores = self.Concat(self.Add(past, self._past_bias), own, axis=3)
        a = self.Softmax(scores, axis=3)
        old = self.MatMul(self.columns(a, 0, -1), past_values)
        return self.Add(old, self.Mul(self.columns(a, -1, np.iinfo(np.int64).max), value))
