#!/usr/bin/env python3
"""Translates, a line for each line: python translate.py < source.txt > translation.txt

From Python: Translator("OUT").translate(["A sentence."], beam=5), where OUT is the folder of this file.

B sentences, k hypotheses (rows) for each, R = B·k; S source positions, V target words, T steps.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import numpy as np
import onnxruntime as ort

FILES = ("config.json", "source.onnx", "source.txt", "step.onnx", "target.txt", "weights.bin")
NUMBERS = ("pad", "unk", "eos", "specials", "source_words", "target_words", "source_positions", "target_positions")
ROOM = 16  # steps that memory is made for at a time
LONGEST_WORD = 500  # letters that byte pair encoding gets at once


def option(default: float, text: str) -> Any:
    """An option of the search, for Python and for the command line."""
    return field(default=default, metadata={"help": text})


@dataclass
class Options:
    """How to search."""

    beam: int = option(5, "hypotheses that are kept of each sentence")
    nbest: int = option(1, "translations of each line; with more than one, each with its score before it")
    lenpen: float = option(1.0, "power of its length that a hypothesis's score is divided by")
    unkpen: float = option(0.0, "taken from the score of each unknown word")
    word_penalty: float = option(0.0, "added to the score of each word but the end")
    min_len: int = option(1, "a translation has at least so many tokens")
    max_len_a: float = option(0.0, "a translation has at most A * x + B tokens, x the longest source of its batch")
    max_len_b: int = option(200, "see there")
    max_tokens: int = option(2000, "source tokens of a batch, padding included")

    def check(self) -> None:
        """Raises ValueError: they do not go together."""
        for name, kind in (("beam", int), ("nbest", int), ("min_len", int), ("max_len_b", int), ("max_tokens", int)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is {getattr(self, name)!r} and must be a whole number")
        if not 1 <= self.nbest <= self.beam:
            raise ValueError(f"nbest is {self.nbest} and beam {self.beam}: 1 <= nbest <= beam")
        if min(self.min_len, self.max_len_a, self.max_len_b) < 0 or self.max_tokens < 1:
            raise ValueError("lengths cannot be negative, and a batch must hold a token")
        if not np.isfinite([self.lenpen, self.unkpen, self.word_penalty, self.max_len_a]).all():
            raise ValueError("lenpen, unkpen, word_penalty and max_len_a must be finite")


class Hypothesis(NamedTuple):
    """A translation: words as the model writes them, and their log-probability divided by a power of their number."""

    words: list[str]
    score: float


class Folder:
    """The exported files, which are read only as they were written.

    Raises:
        ValueError: a file is missing or has changed, or they do not fit together.
    """

    def __init__(self, path: str | Path, threads: int) -> None:
        self.path = Path(path)
        self._check_sums()
        self.config = self._read_config()
        c = self.config
        self.source, self.target = (self._read_words(side, c[f"{side}_words"]) for side in ("source", "target"))
        if not max(c["pad"], c["unk"], c["eos"]) < c["specials"] <= min(c["source_words"], c["target_words"]):
            raise ValueError(f"{self.path / 'config.json'}: special symbols are not the first words")
        self.read, self.step = (self._load(f"{name}.onnx", threads) for name in ("source", "step"))
        self.shapes = {each.name: each.shape for each in self.step.get_inputs()}
        if self.shapes != c["step"]:
            raise ValueError(f"{self.path / 'step.onnx'} is not what config.json describes")

    def _check_sums(self) -> None:
        lines = self.text("SHA256SUMS").splitlines()
        sums = {line[66:]: line[:64] for line in lines if line[64:66] == "  "}
        for name in {*FILES, *sums}:
            path, sha = self.path / name, hashlib.sha256()
            if name not in sums or "/" in name or "\\" in name or not path.is_file():
                raise ValueError(f"{path} is missing, or not in SHA256SUMS: export the model again")
            with path.open("rb") as file:
                while block := file.read(2**20):
                    sha.update(block)
            if sha.hexdigest() != sums[name]:
                raise ValueError(f"{path} is not as it was exported (SHA256SUMS): export the model again")

    def text(self, name: str) -> str:
        """What is in a file of text."""
        try:
            return (self.path / name).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path / name} cannot be read: {error}") from None

    def _read_config(self) -> dict[str, Any]:
        path = self.path / "config.json"
        try:
            config = json.loads(self.text("config.json"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(config, dict) or config.get("format") != 1:
            raise ValueError(f"{path} is not of a model that this program can read")
        for name in NUMBERS:
            if type(config.get(name)) is not int or not 0 <= config[name] < 2**31:
                raise ValueError(f"{path}: {name} is {str(config.get(name))[:99]!r} and must be a number")
        for name in ("source_language", "target_language", "bpe_separator"):
            if not isinstance(config.get(name), str | None):
                raise ValueError(f"{path}: {name} must be text")
        return config

    def _read_words(self, side: str, count: int) -> list[str]:
        words = self.text(f"{side}.txt").removesuffix("\n").split("\n")
        if len(words) != count:
            raise ValueError(f"{self.path / side}.txt has {len(words)} words, and the model knows {count}")
        return words

    def candidates(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Those of each source word, (source words, K), and those of every batch; None where all words are."""
        if self.config.get("candidates") is not True:
            return None
        try:
            tables = [np.load(self.path / f"{name}.npy", allow_pickle=False) for name in ("candidates", "frequent")]
            table, always = (each.astype(np.int64, casting="safe") for each in tables)
            fits = (table.ndim, always.ndim, len(table)) == (2, 1, self.config["source_words"])
        except (ValueError, OSError, TypeError, EOFError) as error:
            raise ValueError(f"{self.path / 'candidates.npy'} cannot be read: {error}") from None
        if not fits or any(each.min() < 0 or each.max() >= self.config["target_words"] for each in (table, always)):
            raise ValueError(f"{self.path / 'candidates.npy'} is not of this model")
        return table, always

    def _load(self, name: str, threads: int) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        try:
            return ort.InferenceSession(str(self.path / name), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class for each of its errors
            raise ValueError(f"{self.path / name} cannot be loaded: {str(error).splitlines()[0]}") from None


class Decoding:
    """The state of a batch between its steps.

    Args:
        folder: the model.
        source: words, padded on the right, (B, S).
        beam: k.
        candidates: words to predict among, (n,), or None for all.
        attends: whether to find the source word that each row attends to most.
    """

    def __init__(
        self, folder: Folder, source: np.ndarray, beam: int, candidates: np.ndarray | None, attends: bool
    ) -> None:
        self.folder, self.beam, self.candidates = folder, beam, candidates
        self.batch = run(folder.read, {"words": source} | ({} if candidates is None else {"candidates": candidates}))
        self.per_sentence = [name for name in self.batch if name.startswith("source")]
        self.words = source[:, None] != folder.config["pad"]
        self.words &= source[:, None] != folder.config["eos"]
        sentences, shapes = len(source), folder.shapes
        self.states = {
            name: np.zeros((sentences, shape[1]), np.float32) for name, shape in shapes.items() if "state" in name
        }
        self.past = {name: shape for name, shape in shapes.items() if name.startswith(("keys", "values"))}
        for name, shape in self.past.items():
            self.batch[name] = np.zeros([{"B": sentences, "P": 0}.get(size, size) for size in shape], np.float32)
        self.ancestors = np.full((sentences, beam, 0), -1)  # which of a sentence's rows each continues, step by step
        self.position = 0
        names = [each.name for each in folder.step.get_outputs()]
        self.outputs = [name for name in names if attends or name != "attention"]

    def step(self, tokens: np.ndarray, order: np.ndarray, count: int) -> list[np.ndarray]:
        """One more word of each row, (R,), each of which continues the row of the step before that ``order`` says.

        Returns:
            log-probabilities of each row's best words, (R, count), these words, log-probabilities of padding, unknown
            words and the end, (R, 3), and, where asked for, the place of the most attended source word, (R,).
        """
        sentences = len(self.words)
        if self.past:
            self._make_room()
            rows = len(tokens) // sentences
            ancestors = self.ancestors.reshape(-1, self.ancestors.shape[2])[order].reshape(sentences, rows, -1)
            own = np.arange(self.beam)
            bias = np.where(ancestors[..., None] == own, np.float32(0), np.float32(-np.inf))
            self.batch["past"] = bias.reshape(sentences, 1, rows, -1)
            ancestors[:, :, self.position] = own[:rows]
            self.ancestors = ancestors
        given = self.batch | self.states
        given |= {"tokens": tokens, "position": np.array([self.position]), "count": np.array([count]), "order": order}
        given = {name: given[name] for name in self.folder.shapes}
        found = run(self.folder.step, given, self.outputs)
        self.states = {name: found.pop(name.replace("state", "next")) for name in self.states}
        self._remember(found)
        self.position += 1
        results = [found[name] for name in ("best", "words", "ruled")]
        if "attention" in found:
            attention = found["attention"].reshape(sentences, -1, self.words.shape[2])
            results.append(np.where(self.words, attention, -1).argmax(axis=2).ravel())
        return results

    def _make_room(self) -> None:
        """For the keys and values of this step."""
        if self.position < self.ancestors.shape[2]:
            return
        self.ancestors = np.pad(self.ancestors, [(0, 0), (0, 0), (0, ROOM)], constant_values=-1)
        for name, shape in self.past.items():
            sizes = [(0, ROOM * self.beam if size == "P" else 0) for size in shape]
            self.batch[name] = np.pad(self.batch[name], sizes)

    def _remember(self, found: dict[str, np.ndarray]) -> None:
        """Put the step's keys and values beside the earlier ones, where no row but its own descendants sees them."""
        first = self.position * self.beam
        for number in range(len(self.past) // 2):
            keys, values = self.batch[f"keys{number}"], self.batch[f"values{number}"]
            new = found[f"new{number}"].reshape(len(keys), -1, 2, *keys.shape[1:3])
            keys[..., first : first + new.shape[1]] = new[:, :, 0].transpose(0, 2, 3, 1)
            values[:, :, first : first + new.shape[1]] = new[:, :, 1].swapaxes(1, 2)

    def keep(self, places: np.ndarray) -> None:
        """Go on with the sentences that are now at these places; the order of the next step is of their rows."""
        moved = np.nonzero(places != np.arange(len(places)))[0]

        def kept(x: np.ndarray) -> np.ndarray:
            x[moved] = x[places[moved]]
            return x[: len(places)]

        for name in (*self.per_sentence, *self.past):
            self.batch[name] = kept(self.batch[name])
        self.words = kept(self.words)


def run(
    program: ort.InferenceSession, given: dict[str, np.ndarray], outputs: list[str] | None = None
) -> dict[str, np.ndarray]:
    """What a program gives, by name; nothing is copied on the way in or out."""
    names = [each.name for each in program.get_outputs()] if outputs is None else outputs
    try:
        values = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(each)) for name, each in given.items()}
        found = program.run_with_ort_values(names, values)
    except Exception as error:  # onnxruntime has a class for each of its errors
        raise ValueError(f"the model cannot be run: {str(error).splitlines()[0]}") from None
    return {name: value.numpy() for name, value in zip(names, found)}


def search(decoding: Decoding, config: dict[str, Any], options: Options, longest: int) -> list[list[tuple[Any, ...]]]:
    """Beam search, as fairseq's: of each sentence the hypotheses that end first, the best first.

    Returns:
        of each its score, its words, and the place of the source word that each attends to most, if that was asked for.
    """
    k, vocabulary = options.beam, config["target_words"]
    if decoding.candidates is not None:
        vocabulary = len(decoding.candidates)
    sentences = np.arange(len(decoding.words))
    tokens, order = np.full(len(sentences), config["eos"]), np.arange(len(sentences))
    totals = np.zeros((len(sentences), 1), np.float32)  # of one row, for at first all would be alike
    history: list[tuple[np.ndarray, ...]] = []
    found: list[list[tuple[Any, ...]]] = [[] for _ in sentences]
    for step in range(longest + 1):
        best, words, ruled, *attended = decoding.step(tokens, order, min(2 * k + 3, vocabulary))
        history.append((tokens, order, *attended))
        if decoding.candidates is not None:
            words = decoding.candidates[words]
        best, words = by_the_rules(best, words, ruled, config, options, step, longest)
        # The best 2k of each sentence, of which those end that are among the first k...
        rows, each = totals.shape[1], best.shape[1]
        scores = (best.reshape(len(sentences), rows, each) + totals[:, :, None]).reshape(len(sentences), -1)
        at = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * k]
        scores, words = (np.take_along_axis(x.reshape(len(sentences), -1), at, 1) for x in (scores, words))
        continued = at // each + rows * np.arange(len(sentences))[:, None]
        ends = (words == config["eos"]) & (scores > -np.inf)
        for place, rank in zip(*np.nonzero(ends[:, :k])):
            hypotheses = found[sentences[place]]
            if len(hypotheses) < k:
                score = scores[place, rank] / np.float32((step + 1) ** options.lenpen)
                hypotheses.append((float(score), *trace_back(history, continued[place, rank])))
        # ... and the first k that do not end go on, unless their sentence has k hypotheses.
        going = np.argsort(ends, axis=1, kind="stable")[:, :k]
        totals, words, continued = (np.take_along_axis(x, going, 1) for x in (scores, words, continued))
        stay = [place for place, sentence in enumerate(sentences) if len(found[sentence]) < k]
        if not stay:
            break
        if len(stay) < len(sentences):
            kept, last = set(stay), reversed(stay)
            places = np.array([place if place in kept else next(last) for place in range(len(stay))])
            decoding.keep(places)
            sentences, totals, words, continued = (x[places] for x in (sentences, totals, words, continued))
        tokens, order = words.ravel(), continued.ravel()
    return [sorted(hypotheses, key=lambda each: -each[0]) for hypotheses in found]


def by_the_rules(
    best: np.ndarray, words: np.ndarray, ruled: np.ndarray, config: dict[str, Any], options: Options, step: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the words that each row may go on with, and these words: (R, n) each, n > 2k where the end is not forced."""
    _, unknown, end = np.split(np.where(np.isnan(ruled), np.float32(-np.inf), ruled), 3, axis=1)
    if step == longest:
        return end, np.full(end.shape, config["eos"])
    best = np.where(np.isnan(best) | (words < config["specials"]) & np.isin(words, [config["pad"], config["unk"], config["eos"]]), np.float32(-np.inf), best)
    best += np.float32(options.word_penalty)
    unknown = unknown - np.float32(options.unkpen - options.word_penalty)
    if step < options.min_len:
        end = np.full_like(end, -np.inf)
    missing = max(0, 2 * options.beam - best.shape[1])
    best = np.concatenate([best, unknown, end, np.full((len(best), missing), -np.inf, np.float32)], axis=1)
    others = np.array([config["unk"], config["eos"]] + [config["pad"]] * missing)
    return best, np.concatenate([words, np.broadcast_to(others, (len(words), len(others)))], axis=1)


def trace_back(history: list[tuple[np.ndarray, ...]], row: int) -> tuple[list[int], list[int]]:
    """The words of the hypothesis that this row of the last step ends, and what they attend to."""
    words, attended = [], []
    for number in range(len(history) - 1, 0, -1):
        tokens, order, *_ = history[number]
        words.append(int(tokens[row]))
        row = order[row]
        attended += [int(each[row]) for each in history[number - 1][2:]]
    return words[::-1], attended[::-1]


class Translator:
    """A model that was exported.

    Args:
        folder: its files.
        threads: of the processor; 0 for all.

    Raises:
        ValueError: a file is missing or not as it was written, or they do not fit together.
    """

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        self.folder = Folder(folder, threads)
        self.config = self.folder.config
        c = self.config
        self.numbers = {word: number for number, word in enumerate(self.folder.source) if number >= c["specials"]}
        self.candidates = self.folder.candidates()
        self.bpe, self.tokenize, self.detokenize = None, str, str
        if c["bpe_separator"] is not None:
            from subword_nmt.apply_bpe import BPE

            self.bpe = BPE(io.StringIO(self.folder.text("codes.txt")), separator=c["bpe_separator"])
        if c["source_language"] is not None:
            from sacremoses import MosesDetokenizer, MosesTokenizer

            tokenizer, detokenizer = MosesTokenizer(c["source_language"]), MosesDetokenizer(c["target_language"])
            self.tokenize = partial(tokenizer.tokenize, aggressive_dash_splits=True, return_str=True)
            self.detokenize = lambda text: detokenizer.detokenize(text.split())

    def translate(self, lines: Iterable[str], **options: Any) -> list[Any]:
        """A translation of each line; with nbest above 1 a list of them, the best first.

        Args:
            lines: of text.
            options: as of `Options`, and of `hypotheses`.
        """
        texts = [[self.text(each.words) for each in found] for found in self.hypotheses(lines, **options)]
        return texts if options.get("nbest", 1) > 1 else [each[0] for each in texts]

    def text(self, words: list[str]) -> str:
        """Words of the model as text."""
        line = " ".join(words)
        if self.bpe is not None:
            line = f"{line} ".replace(f"{self.bpe.separator} ", "").rstrip()
        return self.detokenize(line)

    def hypotheses(
        self,
        lines: Iterable[str],
        replace_unk: dict[str, str] | None = None,
        done: Callable[[int], None] = lambda number: None,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """The best translations of each line, in their order; of a blank one it is blank.

        Args:
            lines: of text.
            replace_unk: translations of words: an unknown word of a translation becomes that of the source word which
                it attends to most, or else a copy of that word; None leaves unknown words as they are.
            done: is told how many lines have been translated.
            options: as of `Options`.
        """
        chosen = Options(**options)
        chosen.check()
        sources = [self._words(line) for line in lines]
        results = [[Hypothesis([], 0.0)] * chosen.nbest for _ in sources]
        for batch in self._batches(sources, chosen.max_tokens):
            for place, found in zip(batch, self._translate([sources[place] for place in batch], chosen, replace_unk)):
                results[place] = found
            done(len(batch))
        return results

    def _words(self, line: str) -> list[str]:
        """A line as the model reads it; what is too long for it is left out."""
        line = self.tokenize(line.strip())
        if self.bpe is not None:
            line = segment(self.bpe, line)
        words = line.split()
        longest = self.config["source_positions"] - 1
        if len(words) > longest:
            print(f"a line has {len(words) + 1} tokens: only the first {longest} are translated", file=sys.stderr)
        return words[:longest]

    def _batches(self, sources: list[list[str]], max_tokens: int) -> Iterator[list[int]]:
        """Numbers of lines of like lengths; blank ones are in none."""
        batch: list[int] = []
        for place in sorted((place for place, words in enumerate(sources) if words), key=lambda p: len(sources[p])):
            if batch and (len(batch) + 1) * (len(sources[place]) + 1) > max_tokens:
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _translate(
        self, sources: list[list[str]], options: Options, replace_unk: dict[str, str] | None
    ) -> list[list[Hypothesis]]:
        c = self.config
        length = max(map(len, sources)) + 1
        source = np.full((len(sources), length), c["pad"])
        for row, words in zip(source, sources):
            row[: len(words) + 1] = [*(self.numbers.get(word, c["unk"]) for word in words), c["eos"]]
        candidates = None
        if self.candidates is not None:
            table, always = self.candidates
            candidates = np.unique(np.concatenate([table[source].ravel(), always])).astype(np.int64)
        longest = min(int(options.max_len_a * length + options.max_len_b), c["target_positions"] - 1)
        if options.min_len > longest:
            raise ValueError(f"a translation has at least {options.min_len} words and at most {longest}")
        decoding = Decoding(self.folder, source, options.beam, candidates, replace_unk is not None)
        found = search(decoding, c, options, longest)
        if not all(found):
            raise ValueError("a sentence has no translation: its scores are not numbers")
        return [[self._hypothesis(*each, words, replace_unk) for each in hypotheses[: options.nbest]]
                for words, hypotheses in zip(sources, found)]

    def _hypothesis(
        self, score: float, numbers: list[int], attended: list[int], source: list[str], replace_unk: dict[str, str] | None
    ) -> Hypothesis:
        words = [self.folder.target[number] for number in numbers]
        if replace_unk is not None:
            for place, number in enumerate(numbers):
                if number == self.config["unk"]:
                    copied = source[attended[place]]
                    words[place] = replace_unk.get(copied, copied)
        return Hypothesis(words, score)


def segment(bpe: Any, line: str) -> str:
    """The line in subwords; of a very long word, for which that would take minutes, piece by piece."""
    if len(line) <= LONGEST_WORD:
        return bpe.process_line(line)
    words = ([word[at : at + LONGEST_WORD] for at in range(0, len(word), LONGEST_WORD)] for word in line.split(" "))
    return " ".join(f"{bpe.separator} ".join(map(bpe.process_line, pieces)) for pieces in words)


def read_translations(path: Path) -> dict[str, str]:
    """A file of lines "source target"."""
    lines = (line.decode("utf-8").split() for line in path.read_bytes().split(b"\n"))
    return {words[0]: words[1] for words in lines if len(words) == 2}


def arguments() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    for option in fields(Options):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default, help=option.metadata["help"])
    parser.add_argument("--replace-unk", metavar="FILE", nargs="?", const="", help="replace each unknown word by what the file (lines: source target) has for the source word that it attends to most, or else by a copy of that word")
    parser.add_argument("--buffer", type=int, metavar="LINES", help="how many lines are read before they are translated (default: 1000; 1 from a terminal)")
    parser.add_argument("--threads", type=int, default=0, help="of the processor; 0 for all")
    parser.add_argument("input", nargs="?", type=Path, help="text, by default the standard input")
    return parser


def main() -> None:
    args = vars(arguments().parse_args())
    path, replace, buffer, threads = (args.pop(name) for name in ("input", "replace_unk", "buffer", "threads"))
    translator = Translator(Path(__file__).resolve().parent, threads)
    replace_unk = None if replace is None else read_translations(Path(replace)) if replace else {}
    lines = sys.stdin.buffer if path is None else path.open("rb")
    finished = 0

    def done(number: int) -> None:
        nonlocal finished
        finished += number
        if sys.stderr.isatty() and not lines.isatty():
            print(f"\r{finished} lines", end="", file=sys.stderr, flush=True)

    while block := list(islice(lines, buffer or (1 if lines.isatty() else 1000))):
        texts = [line.decode("utf-8", errors="replace").strip().removeprefix("\ufeff") for line in block]
        for found in translator.hypotheses(texts, replace_unk, done, **args):
            for each in found:
                text = translator.text(each.words)
                line = text if args["nbest"] == 1 else f"{each.score:.4f}\t{text}"
                sys.stdout.buffer.write(line.encode("utf-8") + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"translate.py: error: {error}")
