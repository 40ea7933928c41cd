#!/usr/bin/env python3
"""Translates text, a line for each line: python translate.py < source.txt > translation.txt

From Python: Translator("OUT").translate(["A sentence."], beam=5), OUT being the folder of this file.

B sentences, k hypotheses (rows) for each, R = B·k; S source positions, n of a row's best words.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

Array = np.ndarray
FILES = {"config.json", "source.onnx", "source.txt", "step.onnx", "target.txt", "weights.bin"}
NUMBERS = ("bos", "pad", "eos", "unk", "source_words", "target_words", "source_positions", "target_positions")
TEXTS = ("source_language", "target_language", "bpe_separator")
ROOM = 16  # steps that memory is made for at a time
LONGEST = 500  # letters that byte pair encoding gets at once: a very long word would take it minutes
OPTIONS: dict[str, tuple[float, str]] = {  # of the search, which is fairseq's
    "beam": (5, "hypotheses that are kept of each sentence"),
    "nbest": (1, "translations of each line, each behind its score if there are several"),
    "lenpen": (1.0, "the power of its length that the score of a hypothesis is divided by"),
    "unkpen": (0.0, "taken from the score for each unknown word"),
    "word_penalty": (0.0, "added to the score for each word"),
    "min_len": (1, "fewest words of a translation"),
    "max_len_a": (0.0, "A of A * x + B, the most words of a translation; x is the longest source of its batch"),
    "max_len_b": (200, "B of A * x + B"),
    "max_tokens": (2000, "words in a batch, padding included"),
}
# Memory that one program has used goes to the other.
MEMORY = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
ort.create_and_register_allocator(MEMORY, None)


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def check_sums(folder: Path) -> None:
    """Raises ValueError: a file is missing, or not as it was exported."""
    sums = {line[66:]: line[:64] for line in read_text(folder / "SHA256SUMS").splitlines()}
    for name in sorted(FILES | sums.keys()):
        path = folder / Path(name).name
        if name not in sums or not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sums[name]:
            raise ValueError(f"{path} is missing or not as it was exported, says SHA256SUMS: export the model anew")


def read_config(path: Path) -> dict[str, Any]:
    try:
        c = json.loads(read_text(path))
        fits = c["format"] == 1 and all(type(c[name]) is int and 0 <= c[name] < 2**31 for name in NUMBERS)
        fits &= max(c["bos"], c["pad"], c["eos"], c["unk"]) < min(c["source_words"], c["target_words"])
        fits &= all(isinstance(c[name], (str, type(None))) for name in TEXTS)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error!r:.200}") from None
    if not fits:
        raise ValueError(f"{path} describes no model that this program can read")
    return c


def load(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_mem_pattern = threads, 4, False
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each of its errors
        raise ValueError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from None


def run(program: ort.InferenceSession, given: dict[str, Array], names: list[str]) -> dict[str, Array]:
    """A program's outputs by name; nothing is copied on the way in or out."""
    try:
        values = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(each)) for name, each in given.items()}
        return {name: value.numpy() for name, value in zip(names, program.run_with_ort_values(names, values))}
    except Exception as error:  # as above
        raise ValueError(f"the model cannot be run: {str(error).splitlines()[0]}") from None


class Decoding:
    """A batch of source words, (B, S), between the steps of its decoder.

    Nothing of the source is copied for hypotheses, and keys and values never move: a row looks at its ancestors'.
    """

    def __init__(self, model: Translator, source: Array, beam: int, candidates: Array, attends: bool) -> None:
        self.model, self.beam, self.position = model, beam, 0
        given = {"words": source, "candidates": candidates}
        given = {each.name: given[each.name] for each in model.read.get_inputs()}
        self.state = run(model.read, given, [each.name for each in model.read.get_outputs()])
        self.kept = [name for name in self.state if name.startswith("source")]  # an entry for each sentence
        for name, shape in model.inputs.items():
            if name.startswith(("state", "keys", "values")):
                sizes = {"B": len(source), "before": len(source), "P": 0}
                self.state[name] = np.zeros([sizes.get(size, size) for size in shape], np.float32)
        self.past = [name for name in self.state if name.startswith(("keys", "values"))]
        self.ancestors = np.full((len(source), beam, 0), -1)  # the row that each continues, at each step
        self.state["candidates"] = candidates
        self.outputs = [each.name for each in model.step.get_outputs() if attends or each.name != "attended"]

    def step(self, tokens: Array, order: Array, rules: Array) -> list[Array]:
        """One more word of each row, (R,), which continues the row of the step before that ``order`` names.

        Gives each row's best words by the rules behind their scores, (R, n) each, unknown words and the end being the
        last of them; and, if wanted, the source word that each row attends to most, (R,).
        """
        sentences, position = len(self.state["source0"]), np.array([self.position])
        if self.past:
            self.state["past"] = self.look_back(order.reshape(sentences, -1))
        given = {**self.state, "tokens": tokens, "order": order, "position": position, "rules": rules}
        given["count"] = np.array([2 * self.beam + 3])
        found = run(self.model.step, {name: given[name] for name in self.model.inputs}, self.outputs)
        for name in found:
            if name.startswith("next"):
                self.state[name.replace("next", "state")] = found[name]
            elif name.startswith("new"):
                self.remember(name[3:], found[name])
        self.position += 1
        return [found[name] for name in ("scores", "words", "attended") if name in found]

    def look_back(self, order: Array) -> Array:
        """What is added to a row's scores of all earlier keys, (B, 1, rows, P); makes room for those of this step."""
        if self.position == self.ancestors.shape[2]:
            self.ancestors = np.pad(self.ancestors, [(0, 0), (0, 0), (0, ROOM)], constant_values=-1)
            for name in self.past:
                more = [(0, ROOM * self.beam if size == "P" else 0) for size in self.model.inputs[name]]
                self.state[name] = np.pad(self.state[name], more)
        own = np.arange(self.beam)
        self.ancestors = self.ancestors.reshape(-1, self.ancestors.shape[2])[order]
        bias = np.where(self.ancestors[..., None] == own, np.float32(0), np.float32(-np.inf))
        self.ancestors[:, :, self.position] = own[: order.shape[1]]
        return bias.reshape(len(order), 1, order.shape[1], -1)

    def remember(self, layer: str, new: Array) -> None:
        """Put a step's keys and values, (R, 2·width), beside the earlier ones."""
        keys, values = self.state[f"keys{layer}"], self.state[f"values{layer}"]
        new = new.reshape(len(keys), -1, 2, *keys.shape[1:3])
        places = slice(self.position * self.beam, self.position * self.beam + new.shape[1])
        keys[..., places], values[:, :, places] = new[:, :, 0].transpose(0, 2, 3, 1), new[:, :, 1].swapaxes(1, 2)

    def keep(self, places: Array) -> None:
        """Go on with the sentences that are now at these places, whose rows the next order is of."""
        moved = np.nonzero(places != np.arange(len(places)))[0]
        for name in (*self.kept, *self.past):
            self.state[name][moved] = self.state[name][places[moved]]
            self.state[name] = self.state[name][: len(places)]


def search(decoding: Decoding, eos: int, o: SimpleNamespace, longest: int) -> list[Any]:
    """Beam search: for each sentence (score, words, what they attend to) of k hypotheses, the best first."""
    k, sentences = o.beam, np.arange(len(decoding.ancestors))
    tokens, order = np.full(len(sentences), eos), sentences
    totals = np.zeros((len(sentences), 1), np.float32)  # of one row, for at first all would be alike
    history: list[list[Array]] = []
    found: list[list[Any]] = [[] for _ in sentences]
    for step in range(longest + 1):
        end = 0 if step >= o.min_len else -np.inf
        rules = np.array([o.word_penalty, o.word_penalty - o.unkpen, end], np.float32)
        scores, words, *attended = decoding.step(tokens, order, rules)
        history.append([tokens, order, *attended])
        if step == longest:
            scores, words = scores[:, -1:], words[:, -1:]
        # Of the best 2k of a sentence those end that are among the first k...
        each, rows = scores.shape[1], totals.shape[1]
        scores = (scores + totals.reshape(-1, 1)).reshape(len(sentences), -1)
        at = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * k]
        scores, tokens = (np.take_along_axis(x.reshape(len(at), -1), at, 1) for x in (scores, words))
        order = at // each + rows * np.arange(len(at))[:, None]
        ends = (tokens == eos) & (scores > -np.inf)
        for place, rank in zip(*np.nonzero(ends[:, :k])):
            if len(hypotheses := found[sentences[place]]) < k:
                score = scores[place, rank] / np.float32((step + 1) ** o.lenpen)
                hypotheses.append((float(score), *trace_back(history, order[place, rank])))
        # ... and the first k that do not end go on, until the sentence has k hypotheses.
        going = np.argsort(ends, axis=1, kind="stable")[:, :k]
        totals, tokens, order = (np.take_along_axis(x, going, 1) for x in (scores, tokens, order))
        stay = [place for place, sentence in enumerate(sentences) if len(found[sentence]) < k]
        if not stay:
            break
        if len(stay) < len(sentences):  # the last ones move into the gaps
            kept, last = set(stay), reversed(stay)
            places = np.array([place if place in kept else next(last) for place in range(len(stay))])
            decoding.keep(places)
            sentences, totals, tokens, order = (x[places] for x in (sentences, totals, tokens, order))
        tokens, order = tokens.ravel(), order.ravel()
    return [sorted(hypotheses, key=lambda each: -each[0]) for hypotheses in found]


def trace_back(history: list[list[Array]], row: int) -> tuple[list[int], list[int]]:
    """Words of what this row of the last step ends, and what they attend to."""
    words, attended = [], []
    for (tokens, order, *_), (_, _, *before) in zip(history[:0:-1], history[-2::-1]):
        words.append(int(tokens[row]))
        row = order[row]
        attended += [int(each[row]) for each in before]
    return words[::-1], attended[::-1]


class Translator:
    """A model that was exported to this folder, with so many threads (0: one for each core).

    Raises ValueError: a file is missing or has changed, or they do not fit together.
    """

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        folder = Path(folder)
        check_sums(folder)
        self.config = c = read_config(folder / "config.json")
        source, self.target = (read_text(folder / f"{side}.txt")[:-1].split("\n") for side in ("source", "target"))
        self.read, self.step = (load(folder / f"{name}.onnx", threads) for name in ("source", "step"))
        self.inputs = {each.name: each.shape for each in self.step.get_inputs()}
        if (len(source), len(self.target), self.inputs) != (c["source_words"], c["target_words"], c.get("inputs")):
            raise ValueError(f"{folder}: words and programs are not those that config.json describes")
        specials = {c["bos"], c["pad"], c["eos"]}  # text that is written like these is not them
        self.numbers = {word: n for n, word in enumerate(source) if n not in specials}
        self.bpe, self.tokenizer = None, None
        names = ("candidates", "frequent") if c.get("candidates") else ()
        self.candidates = [np.load(folder / f"{name}.npy") for name in names]
        if c["bpe_separator"] is not None:
            from subword_nmt.apply_bpe import BPE  # noqa: PLC0415  (not all models need it)

            self.bpe = BPE(io.StringIO(read_text(folder / "codes.txt")), separator=c["bpe_separator"])
        if c["source_language"] is not None:
            from sacremoses import MosesDetokenizer, MosesTokenizer  # noqa: PLC0415  (as above)

            self.tokenizer, self.detokenizer = (
                MosesTokenizer(c["source_language"]),
                MosesDetokenizer(c["target_language"]),
            )

    def translate(self, lines: Iterable[str], nbest: int = 1, **options: Any) -> list[Any]:
        """A translation of each line, or with nbest=2 and more a list of them. Options as of `hypotheses`."""
        found = self.hypotheses(lines, nbest=nbest, **options)
        return [texts if nbest > 1 else texts[0] for texts in ([text for text, _ in each] for each in found)]

    def hypotheses(
        self, lines: Iterable[str], replace_unk: dict[str, str] | None = None, progress: bool = False, **options: float
    ) -> list[list[tuple[str, float]]]:
        """The nbest translations of each line with their scores, the best first; a blank line stays blank.

        With replace_unk each unknown word becomes what that has for the source word that it attends to most, or else a
        copy of that word. The scores are log-probabilities by a power of the length. Options are those of `OPTIONS`.
        """
        o = self.options(options)
        sources = [self.words(line) for line in lines]
        results = [[("", 0.0)] * o.nbest for _ in sources]
        places = sorted((place for place, words in enumerate(sources) if words), key=lambda at: len(sources[at]))
        while places:
            fit = 1
            while fit < len(places) and (fit + 1) * (len(sources[places[fit]]) + 1) <= o.max_tokens:
                fit += 1
            batch, places = places[:fit], places[fit:]
            for place, found in zip(batch, self.batch([sources[place] for place in batch], o, replace_unk)):
                results[place] = found
            if progress:
                print(f"\r{len(places)} lines left   ", end="", file=sys.stderr, flush=True)
        return results

    def options(self, given: dict[str, float]) -> SimpleNamespace:
        for name, value in given.items():
            kind = int if isinstance(OPTIONS.get(name, (0.0,))[0], int) else (int, float)
            if name not in OPTIONS or not isinstance(value, kind) or not abs(value) < 1e9:
                raise ValueError(f"there is no option {name}={value!r}")
        o = SimpleNamespace(**{name: given.get(name, default) for name, (default, _) in OPTIONS.items()})
        if not (1 <= o.nbest <= o.beam and o.min_len >= 0 and o.max_tokens > 0):
            raise ValueError("1 <= nbest <= beam, 0 <= min_len and 0 < max_tokens are wanted")
        return o

    def words(self, line: str) -> list[str]:
        """A line as the model reads it, without the end of one that is too long for it."""
        if self.tokenizer is not None:
            line = self.tokenizer.tokenize(line.strip(), aggressive_dash_splits=True, return_str=True)
        words, longest = line.split(), self.config["source_positions"] - 1
        if self.bpe is not None:
            cut = ([word[at : at + LONGEST] for at in range(0, len(word), LONGEST)] for word in words)
            words = " ".join(f"{self.bpe.separator} ".join(map(self.bpe.process_line, each)) for each in cut).split()
        if len(words) > longest:
            print(f"a line has {len(words)} words: only the first {longest} are translated", file=sys.stderr)
        return words[:longest]

    def batch(
        self, sources: list[list[str]], o: Any, replace_unk: dict[str, str] | None
    ) -> list[list[tuple[str, float]]]:
        """The nbest translations of each source, of which the last is the longest."""
        c, length = self.config, len(sources[-1]) + 1
        source = np.full((len(sources), length), c["pad"])
        for row, words in zip(source, sources):
            row[: len(words) + 1] = [*(self.numbers.get(word, c["unk"]) for word in words), c["eos"]]
        candidates = np.arange(c["target_words"])
        if self.candidates:
            candidates = np.union1d(self.candidates[0][source], self.candidates[1]).astype(np.int64)
        longest = min(int(o.max_len_a * length + o.max_len_b), c["target_positions"] - 1)
        if o.min_len > longest or 2 * o.beam + 3 > len(candidates):
            raise ValueError(f"of {o.min_len} to {longest} words, and a beam of {o.beam}, there is no translation")
        decoding = Decoding(self, source, o.beam, candidates, attends=replace_unk is not None)
        results = []
        for words, found in zip(sources, search(decoding, c["eos"], o, longest)):
            if not found:
                raise ValueError("a sentence has no translation: its scores are not numbers")
            results.append([(self.text(*each, words, replace_unk or {}), score) for score, *each in found[: o.nbest]])
        return results

    def text(self, numbers: list[int], attended: list[int], source: list[str], replace_unk: dict[str, str]) -> str:
        """A translation as one reads it."""
        words = [self.target[number] for number in numbers]
        for place, at in enumerate(attended):
            if numbers[place] == self.config["unk"]:
                words[place] = replace_unk.get(source[at], source[at])
        line = " ".join(word for word, number in zip(words, numbers) if number != self.config["bos"])
        if self.bpe is not None:
            line = f"{line} ".replace(f"{self.bpe.separator} ", "").rstrip()
        return line if self.tokenizer is None else self.detokenizer.detokenize(line.split())


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text, metavar="N")
    parser.add_argument(
        "--replace-unk", nargs="?", const="", metavar="FILE", help="lines 'source target'; without, copy"
    )
    parser.add_argument("--buffer", type=int, default=1000, metavar="N", help="lines that are read at once from a file")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the processor; 0: one for each core")
    parser.add_argument("input", nargs="?", type=Path, help="text to translate; without it, what comes in")
    args = vars(parser.parse_args())
    path, replace, buffer, threads = (args.pop(name) for name in ("input", "replace_unk", "buffer", "threads"))
    translator = Translator(Path(__file__).resolve().parent, threads)
    if replace is not None:
        pairs = read_text(Path(replace)).split("\n") if replace else []
        replace = {words[0]: words[1] for words in map(str.split, pairs) if len(words) == 2}
    lines = sys.stdin.buffer if path is None else path.open("rb")
    progress = sys.stderr.isatty() and not lines.isatty()
    while block := list(islice(lines, 1 if lines.isatty() else buffer)):
        texts = [line.decode("utf-8", errors="replace").removeprefix("\ufeff") for line in block]
        for found in translator.hypotheses(texts, replace, progress, **args):
            for text, score in found:
                sys.stdout.buffer.write(f"{score:.4f}\t{text}\n".encode() if len(found) > 1 else f"{text}\n".encode())
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"translate.py: error: {error}")
