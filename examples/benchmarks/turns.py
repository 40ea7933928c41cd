"""Shared code of the benchmarks: random sentences, timing of contestants in turns, and comparison of hypotheses."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.models.fconv import FConvModel
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import fairseq_plugins
from fairseq_plugins.convs2s.fconv import convert_options, convert_parameters
from fairseq_plugins.convs2s.model import ConvS2SModel
from fairseq_plugins.cpu.packing import prepare_linear
from fairseq_plugins.repairs.wrapping import replaced

DEVICE = ("device", "cpu", "device: cpu or cuda")
JSON = ("json", "", "also write all figures, the machine and the options to this JSON file")
SIZES = (
    ("layers", 20, "convolutional layers in encoder and decoder"),
    ("width", 512, "units of each layer"),
    ("kernel", 3, "kernel width"),
    ("transformer-layers", 6, "layers of width 512/2048 in encoder and decoder of the Transformers"),
    ("vocabulary", 40000, "words"),
)


def parse_options(
    description: str | None, options: Iterable[tuple[str, int | str | bool, str]], program: str = "fairseq-generate"
) -> Namespace:
    """Parse the options of a script; set torch's number of threads and seed.

    The type of an option is that of its default; an option whose default is False takes no value.

    Args:
        description: description of the script.
        options: name, default and help of each option.
        program: name of a fairseq command; the memory settings of this command are applied to the process.
    """
    with replaced(sys, "argv", [program]):
        fairseq_plugins.install(command=True)  # set up the process as for fairseq's commands
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    common = (
        ("threads", 2, "processor threads"),
        ("rounds", 5, "timed turns of each contestant"),
        ("seed", 1, "random seed"),
    )
    for option, default, text in chain(options, common):
        if default is False:
            parser.add_argument(f"--{option}", action="store_true", help=text)
            continue
        parser.add_argument(f"--{option}", type=type(default), default=default, help=f"{text} (default: %(default)s)")
    args = parser.parse_args()
    devices = ["cpu", *["cuda"] * torch.cuda.is_available()]
    if vars(args).get("device", "cpu") not in devices:
        parser.error(f"--device {args.device}: not available; use {' or '.join(devices)}")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    return args


def make_dictionary(size: int) -> Dictionary:
    """Return a dictionary of this size."""
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def build(
    architecture: str, source: Dictionary, target: Dictionary | None = None, **sizes: object
) -> tuple[Namespace, BaseFairseqModel]:
    """Return an architecture's options and a model with random weights; ``target`` defaults to ``source``."""
    options = Namespace(**{"arch": architecture, "max_source_positions": 1024, "max_target_positions": 1024, **sizes})
    ARCH_CONFIG_REGISTRY[architecture](options)
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target or source)
    return options, ARCH_MODEL_REGISTRY[architecture].build_model(options, task)


def fconv_and_convs2s(architecture: str, dictionary: Dictionary, **sizes: object) -> tuple[FConvModel, ConvS2SModel]:
    """Build an fconv with random weights, and a convs2s with the same weights."""
    options, theirs = build(architecture, dictionary, **sizes)
    parameters = theirs.state_dict()
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    ours = ConvS2SModel.build_model(Namespace(**convert_options(options, parameters)), task)
    ours.load_state_dict(convert_parameters(parameters))
    return theirs, ours


def prepare(model: BaseFairseqModel, beam: int) -> None:
    """Prepare a model for translation, as fairseq-generate does."""
    model.make_generation_fast_(beamable_mm_beam_size=beam, need_attn=False)
    model.eval()


def random_sentences(
    dictionary: Dictionary, sentences: int, length: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a padded batch of random sentences, and their lengths, which are at least three quarters of ``length``."""
    tokens = torch.randint(dictionary.nspecial, len(dictionary), (sentences, length))
    lengths = torch.randint(length * 3 // 4, length + 1, (sentences,))
    for sentence, end in zip(tokens, lengths, strict=True):
        sentence[end - 1] = dictionary.eos()
        sentence[end:] = dictionary.pad()
    return tokens.to(device), lengths.to(device)


def take_turns(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1, pause: float = 0
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Time contestants in turns; return each contestant's seconds in each round, and its last result.

    Args:
        contestants: calls to time, by name.
        rounds: timed rounds.
        warm_up: untimed rounds before the timed rounds.
        pause: seconds before each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results = {}
    for turn in tqdm(range(-warm_up, rounds), desc="rounds", leave=False):
        for name, run in contestants.items():
            time.sleep(pause)
            start = time.perf_counter()
            results[name] = run()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds, results


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Return our speed relative to the other contestant's: the median of the ratios of all rounds."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def compare(ours: Any, theirs: Any) -> tuple[int, int, float]:
    """Return the number of equal hypotheses, the number of all hypotheses, and the largest difference of scores."""
    pairs = list(zip(chain(*ours), chain(*theirs), strict=True))
    equal = sum(torch.equal(mine["tokens"], other["tokens"]) for mine, other in pairs)
    return equal, len(pairs), max(abs(float(mine["score"]) - float(other["score"])) for mine, other in pairs)


def multiply_adds(run: Callable[[], Any]) -> int:
    """Count the multiply-add operations of all matrix products and convolutions in a call."""
    with _Products() as products:
        run()
    return products.multiply_adds


class _Products(TorchDispatchMode):
    """Counts multiply-add operations: each output of a product is a sum over the last dimension of the first matrix."""

    multiply_adds = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._overloadpacket.__name__
        if name in ("mm", "bmm", "mv", "linear_dynamic", "_linear_pointwise"):
            self.multiply_adds += result.numel() * args[0].size(-1)
        elif name in ("addmm", "baddbmm", "addmv", "addmm_"):
            self.multiply_adds += result.numel() * args[1].size(-1)
        elif name == "conv_tbc":
            self.multiply_adds += result.numel() * args[1][..., 0].numel()
        return result


def product_rate(rows: int, device: str) -> float:
    """Return the speed of a matrix product in floating-point operations per second.

    A (rows, 1536) matrix is multiplied by a packed (1536, 1024) matrix.
    """
    weight, x = torch.randn(1024, 1536, device=device), torch.randn(rows, 1536, device=device)
    with torch.no_grad():
        product = prepare_linear(weight, None, rows)
        # On a GPU, a single product takes less time than its launch, so many products are timed together.
        each = 1 if device == "cpu" else 100
        seconds, _ = take_turns({"": lambda: [product(x) for _ in range(each)]}, rounds=50)
    return 2 * weight.numel() * rows * each / statistics.median(seconds[""])


def without_state(model: BaseFairseqModel) -> Callable[..., Any]:
    """Return a forward function that ignores the decoder's state and computes each prefix from its start."""
    forward = model.decoder.forward
    return lambda tokens, encoder_out, incremental_state=None: forward(tokens, encoder_out)


def convert_for_ctranslate2(checkpoint: Path, dictionaries: Path, output: Path) -> None:
    """Convert a checkpoint of fairseq's transformer to the format of CTranslate2, which must be installed."""
    command = [sys.executable, "-m", "ctranslate2.converters.fairseq", "--unsafe_deserialization"]
    command += ["--model_path", str(checkpoint), "--data_dir", str(dictionaries), "--output_dir", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"CTranslate2 cannot convert the Transformer:\n{finished.stderr[-3000:]}")


def describe_sizes(args: Namespace) -> str:
    """Describe the sizes of the models, which the options `SIZES` set."""
    return (
        f"convs2s and fconv: {args.layers}+{args.layers} layers of {args.width}, kernel {args.kernel}; Transformers: "
        f"{args.transformer_layers}+{args.transformer_layers} layers of 512/2048; vocabulary {args.vocabulary}"
    )


def machine(args: Namespace) -> str:
    """Return a text about the machine, the versions and the number of turns."""
    return (
        f"{_gpu(args)}{_processor()} ({torch.backends.cpu.get_cpu_capability()}), "
        f"{args.threads} threads, torch {torch.__version__}, fairseq {fairseq.__version__}; "
        f"median of {args.rounds} turns"
    )


def _gpu(args: Namespace) -> str:
    return f"{torch.cuda.get_device_name()}, " if vars(args).get("device") == "cuda" else ""


def _processor() -> str:
    """Return the CPU's name, with family and model if known, because CPUs of Zen 4 and Zen 5 can share a name."""
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8", errors="replace") if information.exists() else ""
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: *(.*)$", text, flags=re.MULTILINE))
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = [f"{field.removeprefix('cpu ')} {fields[field]}" for field in ("cpu family", "model") if field in fields]
    return ", ".join([fields["model name"].strip(), *numbers])


def write_json(args: Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a table, the options and the machine to the file of ``--json``, if it was given."""
    if args.json:
        system = {
            "processor": _gpu(args) + _processor(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fairseq": fairseq.__version__,
        }
        found = {"date": time.strftime("%Y-%m-%d"), "machine": system, "options": vars(args), "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
