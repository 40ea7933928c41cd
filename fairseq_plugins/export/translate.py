"""Translate text line by line: python translate.py < source.txt > translation.txt
From Python, in the folder of this file: Translator(".").translate(["A sentence."], beam=5).
B sentences, k hypotheses (rows) per sentence, R = B·k; S source positions, n words that may continue a row.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # without this setting, onnxruntime writes to ~/.cache, or warns
import onnxruntime as ort

Array = np.ndarray[Any, Any]
FILES = {"config.json", "source.onnx", "source.txt", "step.onnx", "target.txt", "weights.bin"}
NUMBERS = ("bos", "pad", "eos", "unk", "source_words", "target_words", "source_positions", "target_positions")
STRINGS = ("tokenizer", "bpe_separator")  # these values of config.json may be null
CACHED = 1_000_000  # number of characters after which the cache of subword-nmt is emptied; a character takes 80 bytes
GROWTH = 4  # minimum number of steps to add slots for
PRODUCT = (  # an ONNX program: c = MatMulInteger(a, b) of unsigned and signed bytes
    b'\x08\x05:>\n\x18\n\x01a\n\x01b\x12\x01c"\rMatMulInteger\x12\x01gZ\t\n\x01a\x12\x04\n\x02\x08\x02Z\t\n\x01b\x12'
    b"\x04\n\x02\x08\x03b\t\n\x01c\x12\x04\n\x02\x08\x06B\x04\n\x00\x10\n"
)
# Number of CPU cores that this process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OPTIONS: dict[str, tuple[float, str]] = {  # options of the search, which mean the same as in fairseq
    "beam": (5, "hypotheses per sentence"),
    "nbest": (1, "maximum number of translations per line; if above 1, each translation is printed after its score"),
    "lenpen": (1.0, "exponent E, from -10 to 10; the score of a hypothesis is divided by (length of the hypothesis)^E"),
    "unkpen": (0.0, "number subtracted from the score for each unknown word"),
    "word_penalty": (0.0, "number added to the score for each word"),
    "min_len": (1, "minimum number of words in a translation"),
    "max_len_a": (0.0, "A in A * x + B, the maximum number of words; x is the length of the batch's longest source"),
    "max_len_b": (200, "B in A * x + B; see --max-len-a"),
    "max_tokens": (600, "maximum number of words in a batch, including padding"),
}
MEMORY = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
ort.create_and_register_allocator(MEMORY, None)  # both programs reuse the same freed memory


@contextmanager
def errors_of(path: Path, fix: str = "export the model again") -> Iterator[None]:
    """Turn errors in this context into a ValueError that names the file, or a MemoryError that names the fix."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a malformed file can cause any error
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "bad_alloc" in str(error):
            raise MemoryError("out of memory: reduce --max-tokens, --beam or --threads") from None
        problem = f"{path}: {type(error).__name__}: {error}".splitlines()[0][:400]
        raise ValueError(f"{problem}; {fix}") from None


def read_lines(path: Path, fix: str = "export the model again") -> list[str]:
    with errors_of(path, fix):
        return path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")


def decode(lines: Iterable[bytes], place: str = "the input") -> Iterator[str]:
    """Yield decoded lines, and warn about the first line that is not UTF-8."""
    warned = False
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith((b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(f"{place} is gzipped or UTF-16: convert it to UTF-8")
        text = line.decode("utf-8", errors="replace")
        if not warned and (warned := text.encode() != line):
            print(f"line {number} is not UTF-8: \ufffd replaces invalid bytes, here and below", file=sys.stderr)
        yield text.rstrip("\r\n").removeprefix("\ufeff")


def sums_overflow() -> bool:
    """Return whether onnxruntime's int8 products overflow on this CPU: x86 CPUs without VNNI add in 16 bits."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    product = ort.InferenceSession(PRODUCT, options, providers=["CPUExecutionProvider"])
    a, b = np.full((8, 64), 255, np.uint8), np.full((64, 64), 127, np.int8)
    # onnxruntime has a separate kernel for products of a single row, so test eight rows and a single row.
    sums = [product.run(None, {"a": rows, "b": b})[0] for rows in (a, a[:1])]
    return any((each != 64 * 255 * 127).any() for each in sums)


class Program:
    """An ONNX program, called with arrays by name; extra arrays are ignored.  Its outputs are returned by name."""

    def __init__(self, path: Path, options: ort.SessionOptions) -> None:
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {each.name: each.shape for each in self.session.get_inputs()}
        self.outputs = [each.name for each in self.session.get_outputs()]

    def __call__(self, given: dict[str, Array], without: str = "") -> dict[str, Array]:
        names = [name for name in self.outputs if name != without]
        return dict(zip(names, self.session.run(names, {name: given[name] for name in self.inputs}), strict=True))


def new_memory(size: int) -> Array:
    """Return 4 · ``size`` zeros in a memory mapping.  Pages that were never written take no memory, and the system gets
    the memory back when the array is deleted; malloc may keep it.  Raises MemoryError if there is not enough memory."""
    try:
        return np.frombuffer(mmap.mmap(-1, 16 * size), np.float32)
    except OSError:  # each system has other words for it
        raise MemoryError from None


class Decoding:
    """The decode-time state of a batch of source words, (B, S).  Keys and values of earlier steps are stored in P slots
    per sentence, (B, h, P, v).  A row attends only to slots of its ancestors, the previous rows that it continues."""

    def __init__(self, model: Translator, source: Array, beam: int, candidates: Array, attention: bool) -> None:
        self.model, self.beam, self.position = model, beam, 0
        self.without = "" if attention else "attention"
        self.attention: list[Array] = []  # for each step, the attention of L layers, (R, L, S), if requested
        self.state = model.read({"words": source, "candidates": candidates})
        for name, shape in model.step.inputs.items():
            if name.startswith(("state", "keys", "values")):
                known = {"B": len(source), "before": len(source), "P": GROWTH * beam}
                sizes = [known.get(size, size) for size in shape]
                size = int(np.prod(sizes))
                self.state[name] = new_memory(size)[:size].reshape(sizes)
        self.past = [name for name in self.state if name.startswith(("keys", "values"))]
        self.seen: Array = np.zeros((len(source), 1, GROWTH * beam), bool)  # whether a row attends to a slot, (B, k, P)
        self.used = 0  # number of used slots
        self.state |= {"candidates": candidates, "count": np.array([min(2 * beam + 3, len(candidates))])}

    def step(self, tokens: Array, order: Array, rules: Array) -> list[Array]:
        """Decode one word per row.  ``tokens``, (B, k), has the last word of each row.  ``order``, (B, k), has the
        index of each row's parent, a row of the previous step.  Return the scores of possible next words, (R, n), these
        words, (R, n), and for each row the position of the source word with the largest attention, (R,).  The last two
        of the n words are the unknown word and the end of the sentence."""
        given = {"tokens": tokens.ravel(), "order": order.ravel(), "rules": rules}
        if self.past:
            given["past"] = self.look_back(order)
        found = self.model.step({**self.state, **given, "position": np.array([self.position])}, self.without)
        if not self.without:
            self.attention.append(found["attention"].reshape(order.size, *found["attention"].shape[2:]))
        self.state |= {name.replace("next", "state"): found[name] for name in found if name.startswith("next")}
        at = slice(self.used, self.used + order.shape[1])
        for layer in range(len(self.past) // 2):  # store the new keys and values, (R, 2·h·v)
            keys, values = self.state[f"keys{layer}"], self.state[f"values{layer}"]
            new = found[f"new{layer}"].reshape(*order.shape, 2, keys.shape[1], keys.shape[3])
            keys[:, :, at], values[:, :, at] = new.transpose(2, 0, 3, 1, 4)
        if self.past:
            self.seen[:, range(order.shape[1]), range(at.start, at.stop)] = True
        self.used, self.position = at.stop, self.position + 1
        return [found[name] for name in ("scores", "words", "attended")]

    def look_back(self, order: Array) -> Array:
        """Reserve slots for this step, and return the bias of self-attention scores, (B, 1, rows, P)."""
        self.seen = self.seen.reshape(-1, self.seen.shape[2])[order]
        if self.used + order.shape[1] > self.seen.shape[2]:
            self.make_room()
        return np.where(self.seen, np.float32(0), np.float32(-np.inf))[:, None]

    def make_room(self) -> None:
        """Free the slots that no row attends to, and add free slots for at least GROWTH steps."""
        alive = self.seen.any(axis=1)
        self.used = alive.sum(axis=1).max()
        places = np.argsort(~alive, axis=1, kind="stable")[:, : self.used]
        more = max(GROWTH * self.beam, alive.shape[1] - self.used)
        self.seen = np.pad(np.take_along_axis(self.seen, places[:, None], 2), [(0, 0), (0, 0), (0, more)])
        for name in self.past:
            old = self.state[name]
            shape = (*old.shape[:2], self.used + more, old.shape[3])
            memory: Any = old.base
            if (size := int(np.prod(shape))) > memory.size:
                memory = new_memory(size)
            self.state[name] = memory[:size].reshape(shape)
            # The last sentence is copied first, because old and new slots share memory.
            for new, each, kept in reversed([*zip(self.state[name], old, places, strict=True)]):
                new[:, : self.used], new[:, self.used :] = each.take(kept, axis=1), 0

    def keep(self, places: Array) -> None:
        """Keep only the sentences at the given places; ``order`` must then contain only rows of these sentences."""
        moved = np.nonzero(places != np.arange(len(places)))[0]
        for name in (name for name in self.state if name.startswith(("source", "keys", "values"))):
            self.state[name][moved] = self.state[name][places[moved]]
            self.state[name] = self.state[name][: len(places)]


def search(decoding: Decoding, eos: int, o: Namespace, longest: int) -> list[Any]:
    """Return the nbest hypotheses of each sentence.

    A hypothesis is a list of triples, one triple per target word, and a score.  A triple has the target word, the
    position of the source word with the largest attention, and the index of the row to which the target word was added.
    """
    sentences: Array = np.arange(len(decoding.seen))
    k, order = o.beam, sentences[:, None]  # one row per sentence at first, because k rows would be equal
    tokens, totals = np.full_like(order, eos), np.zeros_like(order, np.float32)
    written: Array = np.zeros((len(order), 0, 3), np.int64)  # the triples of each row so far
    found: list[list[Any]] = [[] for _ in sentences]
    for step in range(longest + 1):
        rules = [o.word_penalty, o.word_penalty - o.unkpen, 0 if step >= o.min_len else -np.inf]
        scores, words, attended = decoding.step(tokens, order, np.array(rules, np.float32))
        scores, words = (x[:, -1:] if step == longest else x for x in (scores, words))
        # Select the 2k best continuations of each sentence.  An end-of-sentence token among the k best
        # continuations finishes a hypothesis.  The k best continuations without this token go on to the next step.
        scores = (scores + totals.reshape(-1, 1)).reshape(len(sentences), -1)
        at, rows = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * k], np.arange(len(sentences))[:, None]
        scores, tokens = scores[rows, at], words.reshape(scores.shape)[rows, at]
        order = at // words.shape[1] + totals.shape[1] * rows
        ends = (tokens == eos) & (scores > -np.inf)
        for place, rank in np.argwhere(ends[:, :k]):
            if len(hypotheses := found[sentences[place]]) < k:
                score = scores[place, rank] / np.float32(np.power(step + 1.0, o.lenpen))
                hypotheses.append((written[order[place, rank]].tolist(), float(score)))
        going = np.argsort(ends, axis=1, kind="stable")[:, :k]
        totals, tokens, order = (x[rows, going] for x in (scores, tokens, order))
        if not (stay := [place for place, sentence in enumerate(sentences) if len(found[sentence]) < k]):
            break
        if len(stay) < len(sentences):
            kept, last = set(stay), reversed(stay)  # the last sentences fill the gaps
            places = np.array([place if place in kept else next(last) for place in range(len(stay))])
            decoding.keep(places)
            sentences, totals, tokens, order = (x[places] for x in (sentences, totals, tokens, order))
        triples = np.stack([tokens, attended[order], order], axis=-1).reshape(-1, 1, 3)
        written = np.concatenate([written[order.ravel()], triples], axis=1)
    return [sorted(hypotheses, key=lambda each: -each[1])[: o.nbest] for hypotheses in found]


class Translator:
    """A model exported to a folder.  Raises ValueError if a file is missing, changed or incompatible with another."""

    def __init__(self, folder: str | Path, threads: int = CORES, batches: int = 1, progress: bool = False) -> None:
        self.folder, self.batches, self.progress = (folder := Path(folder)), max(1, batches), progress
        if not (folder / "SHA256SUMS").is_file():  # opening a pipe at this path would block
            raise ValueError(f"{folder / 'SHA256SUMS'} is not a file: export a model to {folder} first")
        sums = {line[66:]: line[:64] for line in read_lines(folder / "SHA256SUMS")}
        for name in sorted(FILES | sums.keys()):
            path = folder / Path(name).name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sums.get(name):
                raise ValueError(f"{path} is missing or differs from SHA256SUMS: export the model again")
        source, self.target = (read_lines(folder / f"{side}.txt") for side in ("source", "target"))
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level, options.enable_mem_pattern = threads, 4, False
        options.add_session_config_entry("session.use_env_allocators", "1")
        if os.environ.get("TRANSLATE_WITHOUT_VNNI") == "1" or sums_overflow():
            # This option is slower, but avoids overflow.
            options.add_session_config_entry("session.x64quantprecision", "1")
        with errors_of(folder / "weights.bin"):
            self.read, self.step = (Program(folder / f"{name}.onnx", options) for name in ("source", "step"))
        sizes = len(source), len(self.target)
        with errors_of(folder / "config.json"):
            self.config = c = json.loads((folder / "config.json").read_bytes())
            valid = all(type(c[name]) is int and 0 <= c[name] < 2**31 for name in NUMBERS) and c["format"] == 3
            valid &= all(isinstance(c[name], (str, type(None))) for name in STRINGS) and type(c["candidates"]) is bool
            valid &= c["languages"] is None or [type(name) for name in c["languages"]] == [str, str]
            valid &= c["tokenizer"] is None or c["languages"] is not None
            valid &= sizes == (c["source_words"], c["target_words"]) and c["inputs"] == self.step.inputs
            if not valid or max(c[name] for name in NUMBERS[:4]) >= min(sizes):
                raise ValueError("the file does not match the model files or this program")
        # Special symbols in text are unknown words.
        self.numbers = {word: n for n, word in enumerate(source) if n not in map(c.get, NUMBERS[:3])}
        self.candidates = np.zeros((sizes[0], 0), int), np.arange(sizes[1], dtype=np.int64)
        self.bpe = self.pieces = self.tokenizer = None
        self.segmented = 0  # number of characters since the cache of subword-nmt was emptied
        if c["candidates"]:
            with errors_of(folder / "candidates.npz"), np.load(folder / "candidates.npz") as tables:
                self.candidates = of_words, always = tables["translations"], tables["always"]
                least, most = (edge(np.append(of_words, always)) for edge in (np.min, np.max))
                if of_words.shape[:-1] != (len(source),) or not 0 <= least <= most < len(self.target):
                    raise ValueError("the file does not match the vocabularies")
        if c["bpe_separator"] is not None:
            bpe = import_module("subword_nmt.apply_bpe").BPE  # a missing package is not an error of the file
            with (
                errors_of(path := folder / "codes.txt"),
                path.open(encoding="utf-8", newline="\n") as codes,
            ):
                self.bpe = bpe(codes, separator=c["bpe_separator"])
        if c.get("sentencepiece"):
            processor = import_module("sentencepiece").SentencePieceProcessor
            with errors_of(folder / "pieces.model"):
                self.pieces = processor(model_file=str(folder / "pieces.model"))
        if c["tokenizer"] is not None:
            self.tokenizer = import_module("sacremoses").MosesTokenizer(c["languages"][0])
            self.detokenizer = import_module("sacremoses").MosesDetokenizer(c["languages"][1])

    def translate(self, lines: Iterable[str], replace_unk: dict[str, str] | None = None, **given: float) -> list[Any]:
        """Return a translation per line, or a list of translations with scores if nbest is above 1; see `OPTIONS`.
        If replace_unk is given, an unknown word is replaced by the source word with the largest attention,
        or by its translation if replace_unk contains one."""
        found = [line["translations"] for line in self.explain(lines, replace_unk, False, **given)]
        if given.get("nbest", 1) == 1:
            return [best["text"] for (best,) in found]
        return [[(each["text"], each["score"]) for each in top] for top in found]

    def options(self, replace_unk: dict[str, str] | None, attention: bool, **given: float) -> Namespace:
        """Validate and return all options of a search."""
        if unknown := given.keys() - OPTIONS.keys():
            raise ValueError(f"{min(unknown)}: unknown option; use one of {', '.join(OPTIONS)}")
        o = Namespace(**{name: given.get(name, default) for name, (default, _) in OPTIONS.items()})
        ranges = {"beam": (1, 1e9), "min_len": (0, 1e9), "max_tokens": (1, 1e9), "lenpen": (-10, 10)}  # avoid overflow
        for name, (default, _) in OPTIONS.items():  # beam is checked before nbest, which depends on beam
            value, (least, most) = getattr(o, name), (1, o.beam) if name == "nbest" else ranges.get(name, (-1e9, 1e9))
            if type(value) not in (int, type(default)) or not least <= value <= most:
                kind = "a whole number" if isinstance(default, int) else "a number"
                raise ValueError(f"{name} must be {kind} from {least:.0f} to {most:.0f}, got {value!r}")
        if not hasattr(replace_unk or {}, "get"):
            raise ValueError(f"replace_unk must be a dictionary, got {replace_unk!r}")
        if self.pieces is not None:
            o.unkpen = 1000  # pieces can spell any text, so <unk> is never correct
        o.attention, o.replace_unk = attention, replace_unk
        return o

    def explain(
        self, lines: Iterable[str], replace_unk: dict[str, str] | None = None, attention: bool = False, **given: float
    ) -> list[dict[str, Any]]:
        """Return a dictionary for each line: words, positions of unknown words, and translations.  A translation is a
        dictionary of text, score, words, positions of unknown words and, if requested, the attention of L layers,
        (L, words, source words + 1); the last source position is the end of the sentence."""
        o = self.options(replace_unk, attention, **given)
        sources = [self.words(line) for line in ([lines] if isinstance(lines, str) else lines)]
        none: dict[str, Any] = {"words": [], "unknown": []}
        blank = {**none, "translations": [{**none, "text": "", "score": 0.0}] * o.nbest}
        results = dict.fromkeys(range(len(sources)), blank)
        batches: list[list[int]] = []
        for place in sorted((at for at, words in enumerate(sources) if words), key=lambda at: len(sources[at])):
            if not batches or (len(batches[0]) + 1) * (len(sources[place]) + 1) > o.max_tokens:
                batches.insert(0, [])  # longest first, so that no long batch starts last
            batches[0].append(place)
        rest = len(batches) % self.batches  # threads that would be idle share these last batches
        work = [(places, 0, 1) for places in batches[: len(batches) - rest]]
        for number, places in enumerate(batches[len(batches) - rest :]):
            parts = self.batches // rest + (number < self.batches % rest)
            parts = max(1, min(parts, len(places) // 2))  # two sentences or more per part: one would be inefficient
            work += [(places, part, parts) for part in range(parts)]
        with ThreadPoolExecutor(self.batches) as pool:  # after an error, map cancels batches that have not started
            translated = pool.map(lambda each: self.batch([sources[at] for at in each[0]], o, *each[1:]), work)
            for done, ((places, part, parts), found) in enumerate(zip(work, translated, strict=True), 1):
                results |= zip(places[part::parts], found, strict=True)
                print(f"\rbatch {done} of {len(work)} " * self.progress, end="", file=sys.stderr, flush=True)
        return [*results.values()]

    def words(self, line: str) -> list[str]:
        """Return the model's words for a line, truncated to the maximum length; a blank line has no words."""
        words, longest = self.segment(line), self.config["source_positions"] - 1
        if len(words) > longest:
            print(f"line truncated from {len(words)} to {longest} tokens", file=sys.stderr)
        return words[:longest]

    def segment(self, line: str) -> list[str]:
        """Split a line into the model's words; a blank line has no words."""
        if not line.strip():
            return []
        if self.tokenizer is not None:
            line = self.tokenizer.tokenize(line.strip(), aggressive_dash_splits=True, return_str=True)
        words = line.split() if self.pieces is None else self.pieces.encode(line, out_type=str)
        if self.bpe is not None:  # long words would take minutes, so split them first
            self.segmented += len(line)
            if self.segmented > CACHED:
                self.bpe.cache, self.segmented = {}, 0  # other threads may still read the old cache
            cut = ([word[at : at + 500] for at in range(0, len(word), 500)] for word in words)
            words = " ".join(f"{self.bpe.separator} ".join(map(self.bpe.process_line, each)) for each in cut).split()
        return words

    def batch(self, sources: list[list[str]], o: Namespace, part: int = 0, parts: int = 1) -> list[dict[str, Any]]:
        """Return the result of `explain` for each source of one part of the batch; by default, of the whole batch.
        Source i belongs to the part with the number i modulo ``parts``.  The longest source must be last."""
        c, length = self.config, len(sources[-1]) + 1
        numbers = [[*(self.numbers.get(word, c["unk"]) for word in words), c["eos"]] for words in sources]
        source = np.array([each + [c["pad"]] * (length - len(each)) for each in numbers])
        of_words, candidates = self.candidates
        if c["candidates"]:
            candidates = np.union1d(of_words[source], candidates).astype(np.int64)
        longest = min(int(o.max_len_a * length + o.max_len_b), c["target_positions"] - 1)
        if o.min_len > longest or o.beam >= len(candidates):
            raise ValueError(
                f"no translation of {o.min_len} to {longest} words is possible with beam {o.beam}: lower --min-len or "
                "--beam, or raise --max-len-b"
            )
        sources, source = sources[part::parts], source[part::parts]
        with errors_of(self.folder / "step.onnx", "export another checkpoint"):
            decoding = Decoding(self, source, o.beam, candidates, o.attention)
            found = search(decoding, c["eos"], o, longest)
            if not all(found):
                raise ValueError("a sentence has no translation, because its scores are NaN")
            results: list[Any] = []
            for words, top in zip(sources, found, strict=True):
                unknown = [place for place, word in enumerate(words) if word not in self.numbers]
                results.append({"words": words, "unknown": unknown, "translations": []})
                for x in top:
                    text, score = self.text(x, words, o.replace_unk)
                    shown = {"text": text, "score": score, "words": [self.target[n] for n, *_ in x[0]]}
                    shown["unknown"] = [place for place, (n, *_) in enumerate(x[0]) if n == c["unk"]]
                    if o.attention:
                        steps = zip(decoding.attention, x[0], strict=False)
                        rows = [of_step[row, :, : len(words) + 1] for of_step, (*_, row) in steps]
                        shown["attention"] = np.stack(rows, axis=1) if rows else decoding.attention[0][:0]
                    results[-1]["translations"].append(shown)
            return results

    def text(self, hypothesis: Any, source: list[str], replace_unk: dict[str, str] | None) -> tuple[str, float]:
        """Return the text of a hypothesis, and its score."""
        copies = [(replace_unk or {}).get(word, word) for word in source]
        bos, unk = self.config["bos"], None if replace_unk is None else self.config["unk"]
        words = [copies[at] if n == unk else self.target[n] for n, at, *_ in hypothesis[0] if n != bos]
        if self.pieces is not None:
            return self.pieces.decode(words).replace("\n", " "), hypothesis[1]
        line = " ".join(words)
        if self.bpe is not None:
            line = f"{line} ".replace(f"{self.bpe.separator} ", "").rstrip()
        return line if self.tokenizer is None else self.detokenizer.detokenize(line.split()), hypothesis[1]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    more = [
        ("buffer", (1000, "number of lines that are read together from a file")),
        ("threads", (CORES, "number of threads; each translates one batch, but all together translate a typed line")),
    ]
    for name, (default, text) in [*OPTIONS.items(), *more]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text, metavar="N")
    parser.add_argument(
        "--replace-unk",
        nargs="?",
        const="",
        metavar="FILE",
        help="replace unknown words by copies of source words, or by translations from a FILE of lines `source target`",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="text to translate (default: the standard input)")
    args = vars(parser.parse_args())
    for stop in {"SIGINT", "SIGPIPE"} & set(dir(signal)):  # exit silently on Ctrl-C and `| head`
        signal.signal(getattr(signal, stop), signal.SIG_DFL)
    path, replace, buffer, threads = (args.pop(name) for name in ("input", "replace_unk", "buffer", "threads"))
    if sys.stdout is None or (path is None and sys.stdin is None):
        raise ValueError("the standard output or input is closed: open it, or redirect it to a file")
    if replace:
        pairs = [line.split() for line in read_lines(Path(replace), "give text in UTF-8")]
        if wrong := [number for number, words in enumerate(pairs, 1) if len(words) not in (0, 2)]:
            raise ValueError(f"--replace-unk {replace}: line {wrong[0]} must have two words")
        replace = dict(filter(None, pairs))
    lines = sys.stdin.buffer if path is None else path.open("rb")
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    typed, texts = lines.isatty(), decode(lines, "the standard input" if path is None else f"--input {path}")
    translator = Translator(Path(__file__).parent, *((threads, 1) if typed else (1, threads, sys.stderr.isatty())))
    while block := list(islice(texts, 1 if typed else max(1, buffer))):
        for found in translator.translate(block, replace, **args):
            best = [found] if args["nbest"] == 1 else [f"{score:.4f}\t{text}" for text, score in found]
            sys.stdout.buffer.write("".join(f"{line}\n" for line in best).encode())
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python flushes the standard output again at exit, so redirect it to the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise OSError(f"the standard output cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError, LookupError, ArithmeticError, MemoryError, RuntimeError) as error:
        sys.exit(f"translate.py: error: {str(error) or type(error).__name__}")
