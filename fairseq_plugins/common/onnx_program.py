"""Builders of ONNX programs, and the weight file that all programs of a model share.

N rows, K inputs, O outputs.  B sentences of S words, k hypotheses (rows) per sentence, R = B·k; h heads of width v,
P number of keys from earlier steps.
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

from fairseq_plugins.cpu.packing import quantise

OPSET = 18
# The domain of onnxruntime's own operators.
CONTRIBUTED = "com.microsoft"
# Weights in the weight file begin at multiples of `_PAGE` bytes, for memory mapping.  Weights of at most `_SMALL` bytes
# are stored in the programs instead.
_PAGE = 4096
_SMALL = 2048

Sizes = list[str | int]  # sizes of a tensor


class Weights:
    """The file with the weights of all programs of a model; equal weights are stored only once.

    The programs refer to the file by ``name``.  With ``int8``, matrices are quantised with one scale per row.

    Attributes:
        block: number of rows of a large matrix, such as an output layer, that a program multiplies in one product.
    """

    block = 4096

    def __init__(self, file: BinaryIO, name: str, int8: bool) -> None:
        self.file, self.name, self.int8 = file, name, int8
        self._places: dict[object, int] = {}

    def tensor(self, name: str, value: np.ndarray[Any, Any]) -> TensorProto:
        """Return a weight as a program stores it: the values of a small weight, or a large weight's place in the file.

        A large weight is written to the file unless the file contains an equal weight, or a matrix with this block.
        """
        if value.nbytes <= _SMALL:
            return numpy_helper.from_array(value, name)
        content = value.tobytes()
        if (key := _identity(value)) not in self._places:
            self.file.write(b"\0" * (-self.file.tell() % _PAGE))
            place = self._places[key] = self.file.tell()
            self.file.write(content)
            for start in range(0, len(value), self.block):
                self._places.setdefault(_identity(value[start : start + self.block]), place + start * value[0].nbytes)
        tensor = TensorProto(name=name, dims=value.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        for field, text in (("location", self.name), ("offset", self._places[key]), ("length", len(content))):
            tensor.external_data.add(key=field, value=str(text))
        return tensor


class Program:
    """A builder of an ONNX program: ``program.Add(x, y)`` adds an operator and returns the name of its result.

    An argument is the name of a result, a weight (torch tensor or array), or a number, which becomes a constant.
    """

    shape: str  # name of the result that holds the sizes (B, T), which `by_sentence` reads

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
        """Add an operator, and return the name of its result, or a list of names if it has several results."""
        inputs = ["" if each is None else self.value(each) for each in arguments]
        number = next(self._numbers)
        results = [f"{operator}_{number}_{place}" for place in range(outputs)]
        self._nodes.append(helper.make_node(operator, inputs, results, domain=domain, **attributes))
        return results if outputs > 1 else results[0]

    def value(self, given: Any) -> str:
        """Return the name of an argument of an operator; weights or numbers with equal values share a name."""
        if isinstance(given, str):
            return given
        array = given.detach().cpu().numpy() if torch.is_tensor(given) else np.asarray(given)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        array = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray turns scalars into vectors
        return self._constant(_identity(array), array)

    def own(self, weight: Tensor) -> str:
        """Return a unique name for a weight, so that onnxruntime does not merge the weight with an equal one."""
        return self._constant(object(), weight.cpu().contiguous().numpy())

    def _constant(self, key: object, array: np.ndarray[Any, Any]) -> str:
        if key not in self._constants:
            self._constants[key] = self.weights.tensor(f"constant_{len(self._constants)}", array)
        return self._constants[key].name

    def input(self, name: str, kind: type, shape: Iterable[str | int]) -> str:
        """Add an input; sizes given as names are dynamic."""
        self._inputs.append(_described(name, kind, shape))
        return name

    def inputs(self) -> dict[str, list[str | int]]:
        """Return all inputs with their sizes."""
        return {
            each.name: [size.dim_param or size.dim_value for size in each.type.tensor_type.shape.dim]
            for each in self._inputs
        }

    def output(self, name: str, result: str, kind: type, shape: Iterable[str | int]) -> None:
        """Add an output."""
        self._nodes.append(helper.make_node("Identity", [result], [name]))
        self._outputs.append(_described(name, kind, shape))

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None, shared: bool = False) -> str:
        """Add ``x Wᵀ + b``, (N, K) -> (N, O); in int8, x is quantised with one scale for all rows.

        ``shared`` says whether `rows` looks up rows of ``weight`` in the same program.
        """
        if not self.weights.int8:
            return self.Gemm(x, weight, *([] if bias is None else [bias]), transB=1)
        steps, scale = quantise(weight)
        # The product needs Wᵀ, and `rows` needs W.  If a program uses both, only W is stored, and onnxruntime computes
        # Wᵀ when it loads the program.
        columns = self.Transpose(steps, perm=[1, 0]) if shared else self.own(steps.t())
        zero = self.own(torch.zeros(len(scale), dtype=torch.int8))
        return self.DynamicQuantizeMatMul(x, columns, scale, zero, bias, domain=CONTRIBUTED)

    def rows(self, table: Tensor, numbers: str) -> str:
        """Add a lookup of rows of a matrix, (V, K), by indices of any shape, (...) -> (..., K)."""
        if not self.weights.int8:
            # A name of its own lets onnxruntime release the matrix of a product after it has packed a copy.  The memory
            # then has only those pages of a table in the weight file that contain looked-up rows.
            return self.Gather(self.own(table.detach()), numbers)
        steps, scale = quantise(table)
        found = self.Cast(self.Gather(steps, numbers), to=TensorProto.FLOAT)
        return self.Mul(found, self.Gather(scale.unsqueeze(1), numbers))

    def chunks(self, x: str, number: int, axis: int) -> list[str]:
        """Add a split into parts of equal size, like torch's ``chunk``."""
        return self.Split(x, outputs=number, axis=axis, num_outputs=number)

    def columns(self, x: str, start: int, end: int, axis: int = -1) -> str:
        """Add ``x[..., start:end]``."""
        return self.Slice(x, [start], [end], [axis])

    def by_sentence(self, x: str, *sizes: int) -> str:
        """Group rows by sentence, (N, ...) -> (B, T, ...), where a sentence has T words or hypotheses."""
        return self.Reshape(x, self.Concat(self.shape, list(sizes), axis=0))

    def heads(self, x: str, heads: int, width: int, *, columns: bool = False) -> str:
        """Split heads, (N, h·v) -> (B, h, T, v), or (B, h, v, T) as columns."""
        return self.Transpose(self.by_sentence(x, heads, width), perm=[0, 2, 3, 1] if columns else [0, 2, 1, 3])

    def glu(self, x: str) -> str:
        """Add a gated linear unit."""
        values, gates = self.chunks(x, 2, axis=-1)
        return self.Mul(values, self.Sigmoid(gates))

    def normalise(self, x: str, norm: nn.LayerNorm) -> str:
        """Add layer normalisation."""
        return self.LayerNormalization(x, norm.weight, norm.bias, axis=-1, epsilon=norm.eps)

    def write(self, path: Path) -> None:
        """Write the program to a file."""
        graph = helper.make_graph(self._nodes, path.stem, self._inputs, self._outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIBUTED, 1)]
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def _identity(array: np.ndarray[Any, Any]) -> object:
    """Return a key that is equal for equal arrays."""
    return array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest()


def _described(name: str, kind: type, shape: Iterable[str | int] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None if shape is None else list(shape)
    )


class SourceProgram(Program):
    """A builder of the program that encodes the source and computes the inputs of the decoding steps.

    Source sentences are padded on the right.  The attributes are names of tensors in the program.

    Attributes:
        words: indices of the source tokens, (B, S).
        length: the number S of positions, (1,).
        mask: one at tokens and zero at padding, (B, S, 1).
        lengths: number of tokens in each sentence, (B,), which LSTMs need.
        bias: bias of attention scores, (B, 1, S), which excludes padding.
        only_words: bias that excludes padding and the end of the sentence, (B, 1, S).
    """

    def __init__(self, weights: Weights, pad: int, eos: int) -> None:
        super().__init__(weights)
        self.words = self.input("words", np.int64, ["B", "S"])
        is_token = self.Not(self.Equal(self.words, pad))
        self.shape = self.Shape(self.words)
        _, self.length = self.chunks(self.shape, 2, axis=0)
        self.mask = self.Unsqueeze(self.Cast(is_token, to=TensorProto.FLOAT), [2])
        self.lengths = self.ReduceSum(self.Cast(is_token, to=TensorProto.INT32), [1], keepdims=0)
        self.bias = self._bias(is_token)
        self.only_words = self._bias(self.And(is_token, self.Not(self.Equal(self.words, eos))))

    def _bias(self, seen: str) -> str:
        return self.Unsqueeze(self.Where(seen, 0.0, -np.inf), [1])

    def flat(self, x: str, width: int) -> str:
        """Flatten to rows, (B, S, width) -> (N, width)."""
        return self.Reshape(x, [-1, width])

    def transposed(self, x: str) -> str:
        """Swap the last two dimensions, (B, S, width) -> (B, width, S)."""
        return self.Transpose(x, perm=[0, 2, 1])

    def windows(self, x: str, width: int, padding: tuple[int, int]) -> str:
        """Concatenate the w inputs around each position, zero outside the sentence, (N, width) -> (N, w·width)."""
        x = self.Mul(self.by_sentence(x, width), self.mask)
        if sum(padding):
            before, after = padding
            x = self.Pad(x, [0, before, 0, 0, after, 0])
            shifted = [self.Slice(x, [start], self.Add(self.length, [start]), [1]) for start in range(1 + sum(padding))]
            x = self.Concat(*shifted, axis=2)
        return self.flat(x, width * (1 + sum(padding)))


class StepProgram(Program):
    """A builder of the program of a decoding step.

    Inputs from the source have one entry per sentence, and are the same in all steps.  States have one entry per row,
    and each step first re-orders them.  Keys and values of earlier steps are not re-ordered; instead, the caller passes
    a bias that masks, for each row, the keys of other hypotheses.

    Args:
        sources: sizes of the inputs from the source; the last of these inputs is a bias that excludes padding and the
            end of the sentence from the reported attention.

    Attributes:
        states: width of each state, by the name of its input.
    """

    def __init__(self, weights: Weights, sources: list[Sizes]) -> None:
        super().__init__(weights)
        self.tokens = self.input("tokens", np.int64, ["R"])
        self.position = self.input("position", np.int64, [1])
        given = [self.input(f"source{n}", np.float32, sizes) for n, sizes in enumerate(sources)]
        *self.sources, self.only_words = given
        self.shape = self.Concat(self.columns(self.Shape(self.sources[0]), 0, 1), [-1], axis=0)  # (B, k)
        self.states: dict[str, int] = {}
        self._attending = 0  # number of calls of `attend_to_past` so far
        self._order = ""
        self._past_bias = ""

    def state(self, width: int) -> str:
        """Add a state of shape (previous rows, width), in the row order of the previous step; return its name."""
        if not self.states:
            self._order = self.input("order", np.int64, ["R"])
        name = self.input(f"state{len(self.states)}", np.float32, ["before", width])
        self.states[name] = width
        return name

    def reordered(self, state: str) -> str:
        """Put the rows of a state into the row order of this step, (previous rows, width) -> (R, width)."""
        return self.Gather(state, self._order, axis=0)

    def keep(self, state: str, after: str) -> None:
        """Set the next value of a state, (R, width)."""
        self.output(state.replace("state", "next"), after, np.float32, ["R", self.states[state]])

    def attend_to_past(self, q: str, keys_values: str, heads: int, width: int) -> str:
        """Add operators that attend to the earlier steps and the current step, (B, h, k, v) -> (B, h, k, v).

        ``keys_values`` are keys and values of the current step, concatenated, (R, 2·h·v).
        """
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
