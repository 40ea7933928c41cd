"""``fairseq-plugins own-data``: from two files or folders of parallel text to translations.

Tokens, BPE, fairseq's binary data, a training that ends when validation no longer improves, and translation.  Each of
fairseq's commands is shown before it runs, and can be repeated by hand.  The same call once more goes on from where the
last one was stopped, or only translates.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

import fairseq_plugins
from fairseq_plugins.tools import parallel_text, score
from fairseq_plugins.tools.corpus import Corpus, File, Texts, prepare
from fairseq_plugins.tools.download import digest
from fairseq_plugins.tools.fairseq_command import fairseq, fairseq_lines
from fairseq_plugins.tools.generated import read_generated, read_text

__all__ = ["add_arguments", "run"]

USER_DIR = Path(fairseq_plugins.__file__).parent

# Later fairseqs leave a last batch out that is no multiple of 8 sentences, in validation and generation too.
ALL_SENTENCES = ["--required-batch-size-multiple", "1"]

PATIENCE = 5  # epochs


def add_arguments(parser: ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="text, a sentence a line (train.en), or a folder of such files (en)"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="its translation, line by line")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for everything that is made")
    parser.add_argument("--arch", default="convs2s_iwslt_de_en", help="architecture (default: %(default)s)")
    parser.add_argument("--source-lang", metavar="XX", help="source language (default: the end of SOURCE's name)")
    parser.add_argument("--target-lang", metavar="XX", help="target language (default: the end of TARGET's name)")
    parts = {
        "valid": "validation part, with the first call (default: held out)",
        "test": "test part, to be scored, with the first call",
    }
    for part, meaning in parts.items():
        parser.add_argument(f"--{part}", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help=meaning)
    parser.add_argument("--translate", metavar="FILE", help="translate a text, or - for stdin, to stdout")
    parser.add_argument(
        "--train",
        default="",
        metavar="'OPTIONS'",
        help="options of fairseq-train that win over those chosen here",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that prepare the text")


def run(args: Namespace) -> None:
    """Prepare, train and translate.

    Raises:
        ValueError: texts do not fit together, an option is wrong, or a command of fairseq fails.
        OSError: a text cannot be read.
    """
    if odd := re.search(r"[,:\\]|\$\{", str(args.output)):
        raise ValueError(f"{args.output}: fairseq takes {odd[0]} for no part of a folder's name; choose another one")
    family = ARCH_MODEL_NAME_REGISTRY.get(args.arch)
    if family is None:
        raise ValueError(f"--arch {args.arch}: there is no such architecture")
    if args.translate not in (None, "-") and not Path(args.translate).is_file():
        raise ValueError(f"--translate: there is no file {args.translate}")
    try:
        wishes = shlex.split(args.train)
    except ValueError as error:
        raise ValueError(f"--train: {error}: {args.train}") from None
    model = args.output / args.arch
    if model.exists() and not (args.output / "settings").exists():
        raise ValueError(f"{model} is in the way of what is to be made under that name; choose another folder")
    corpus = describe(args)
    binary = prepare(corpus, args.output, Path(), workers=args.workers)
    if not (model / "finished").exists():
        pairs, tokens = count(args.output / f"train.{corpus.target}")
        settings = training_settings(family, pairs, tokens)
        print(
            f"\nTraining on {pairs} sentence pairs, until validation has not improved for {PATIENCE} epochs. "
            "A training that is stopped goes on with the same call.",
            file=sys.stderr,
        )
        own = ["--user-dir", USER_DIR, "--arch", args.arch, "--save-dir", model, *ALL_SENTENCES, *settings.split()]
        fairseq("train", binary, *own, *wishes)
        (model / "finished").touch()
    decoding = ["--user-dir", USER_DIR, "--path", model / "checkpoint_best.pt", "--beam", 5, "--tokenizer", "moses"]
    decoding += ["--source-lang", corpus.source, "--target-lang", corpus.target]  # the tokeniser must be told
    if args.test:
        options = ["--remove-bpe", "--max-tokens", 4000, "--results-path", model, *ALL_SENTENCES]
        fairseq("generate", binary, *decoding, *options)
        sentences = read_generated([model / "generate-test.txt"])
        reference = read_text(args.output / "test.reference", sentences)
        best = [sentence.hypotheses[0] for sentence in sentences]
        for name, value in score.bleu(best, reference, None).items():
            print(f"{name}: {value:.2f}", file=sys.stderr)
    bpe = ["--bpe", "subword_nmt", "--bpe-codes", args.output / "code"]
    if args.translate is None:
        words = ["fairseq-interactive", binary, *decoding, *bpe]
        print("\nFor translations, the same call with --translate FILE, or by hand:", file=sys.stderr)
        print(f"\n$ {shlex.join(map(str, words))}", file=sys.stderr)
    else:
        translate(args.translate, [binary, *decoding, *bpe])


def describe(args: Namespace) -> Corpus:
    """The corpus that the options name, with as many merges as its size bears.

    Raises:
        ValueError: a language is missing, folders hold different files, or files different numbers of lines.
    """
    languages = (
        args.source_lang or language_of(args.source, "--source-lang"),
        args.target_lang or language_of(args.target, "--target-lang"),
    )
    if languages[0] == languages[1]:
        raise ValueError(f"source and target language are both {languages[0]}: give --source-lang and --target-lang")
    train = pair_up(args.source, args.target, languages)
    pairs = count_pairs(train, languages)
    if pairs < 20:
        raise ValueError(f"{args.source} has {pairs} sentences, too few to learn from")
    valid, test = (pair_up(texts[0], texts[1], languages) if texts else () for texts in (args.valid, args.test))
    for part in (valid, test):
        if part and not count_pairs(part, languages):
            raise ValueError(f"{part[0][0].path} is empty")
    return Corpus(
        *languages,
        train=train,
        valid=valid,
        tests=(test,) if test else (),
        # 1 % for validation; of a small text up to a tenth, until there are enough to go by.
        valid_every=pairs // min(max(pairs // 100, 200), 3000, pairs // 10),
        tokenise={},
        # 6000 and 10 000 are those of examples/multi30k (29 000 pairs) and fairseq's IWSLT'14 (160 000).
        merges=2000 if pairs < 20_000 else 6000 if pairs < 100_000 else 10_000 if pairs < 1_000_000 else 40_000,
    )


def count_pairs(texts: Texts, languages: tuple[str, str]) -> int:
    """How many sentences the texts have in each of two languages.

    Raises:
        ValueError: in one they have more, or a line is not UTF-8.
    """
    pairs = 0
    for text in texts:
        lines = [
            sum(1 for _ in parallel_text.read_text(Path(file.path), language))
            for file, language in zip(text, languages, strict=True)
        ]
        if lines[0] != lines[1]:
            raise ValueError(f"{text[0].path} has {lines[0]} lines and {text[1].path} {lines[1]}: line must match line")
        pairs += lines[0]
    return pairs


def language_of(path: Path, option: str) -> str:
    """``de`` of ``train.de``, ``train.de.gz`` or a folder ``de``.

    Raises:
        ValueError: the name ends otherwise.
    """
    name = path.name.removesuffix(".gz").rpartition(".")[2]
    if not re.fullmatch("[a-z]{2,3}", name) or name in {"txt", "tsv"}:
        raise ValueError(f"{path}: the name does not end in a language, such as .de; give {option}")
    return name


def pair_up(source: Path, target: Path, languages: tuple[str, str]) -> Texts:
    """The two files, or the files of two folders by their names but for the language.

    Raises:
        ValueError: one is missing, or two have one name.
    """
    for path in (source, target):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
    if source.is_dir() != target.is_dir():
        raise ValueError(f"{source} and {target}: expected two files or two folders")
    if not source.is_dir():
        return ((_file(source), _file(target)),)
    sides = [_by_name(folder, language) for folder, language in zip((source, target), languages, strict=True)]
    if odd := sorted(sides[0].keys() ^ sides[1].keys()):
        raise ValueError(f"{(sides[0] | sides[1])[odd[0]]} is in one language only, by its name")
    if not sides[0]:
        raise ValueError(f"{source} has no files")
    return tuple((_file(sides[0][name]), _file(sides[1][name])) for name in sorted(sides[0]))


def _by_name(folder: Path, language: str) -> dict[str, Path]:
    """``news.2013`` for ``news.2013.en.gz`` or ``news.2013.eng``; hidden files and folders are passed over."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            words = path.name.removesuffix(".gz").split(".")
            ends = [at for at, word in enumerate(words) if word.lower() == language]
            if ends:
                del words[ends[-1]]
            elif len(words) > 1 and words[-1].isalpha():
                del words[-1]
            name = ".".join(words)
            if found.setdefault(name, path) is not path:
                raise ValueError(f"{found[name]} and {path} have one name: which is it?")
    return found


def _file(path: Path) -> File:
    """With a sum of its content, so that another text under the same name is not taken for this one."""
    return File(str(path.absolute()), checksum=f"sha256:{digest(path, 'sha256')}")


def count(path: Path) -> tuple[int, int]:
    """Lines and words."""
    words = [line.count(" ") + 1 for line in parallel_text.read_text(path, "")]
    return len(words), sum(words)


def training_settings(family: str, pairs: int, tokens: int) -> str:
    """Options of fairseq-train for so many sentence pairs and target tokens.

    The rate falls as 0.04 / sqrt(updates), as in examples/multi30k and, at its width of 512, with the Transformer.
    """
    max_tokens = 1500 if pairs < 100_000 else 4000
    epoch = tokens // max_tokens + 1  # updates
    convolutional = family in {"convs2s", "conv_encoder"}
    warmup = min(max(epoch // 4, 100 if convolutional else 400), 4000)
    settings = f"--max-tokens {max_tokens} --dropout {0.2 if pairs < 1_000_000 else 0.1} --clip-norm 1"
    settings += " --label-smoothing 0.1"
    if family == "weighted_transformer":
        settings += " --criterion weighted_label_smoothed_cross_entropy --optimizer simplex_adam"
        settings += f" --lr-scheduler weighted_inverse_sqrt --warmup-updates {warmup}"
        settings += f" --branch-lr-scale 0.1 --branch-warmup-updates {warmup // 10}"
    else:
        settings += " --criterion label_smoothed_cross_entropy --optimizer adam --adam-betas (0.9,0.98)"
        settings += f" --lr {0.04 / warmup**0.5:.2g} --lr-scheduler inverse_sqrt --warmup-updates {warmup}"
    if torch.cuda.is_available():
        settings += " --fp16 --fp16-no-flatten-grads" if family == "weighted_transformer" else " --fp16"
    if epoch > 5000:  # what is lost by a stop
        settings += " --save-interval-updates 5000 --keep-interval-updates 1"
    return f"{settings} --patience {PATIENCE} --no-epoch-checkpoints --log-format simple --log-interval 100"


def translate(text: str, options: list[object]) -> None:
    """``fairseq-interactive``, of whose output only the translations are printed."""
    # What is typed is translated at once, and a file by many sentences.
    batches = (
        ["--buffer-size", 1] if text == "-" and sys.stdin.isatty() else ["--buffer-size", 1000, "--max-tokens", 4000]
    )
    for line in fairseq_lines("interactive", *options, *batches, "--input", text, stdin=None):
        if match := re.fullmatch(r"([A-Z])-\d+\t(.*)\n", line):
            if match[1] == "S":
                blank = not match[2]  # of which models make something up
            elif match[1] == "D":
                print("" if blank else match[2].partition("\t")[2], flush=True)
        else:
            print(line, end="", file=sys.stderr)
