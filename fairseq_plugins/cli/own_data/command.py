"""``fairseq-plugins own-data``: from two files or folders of parallel text to translations.

Tokens, BPE, fairseq's binary data, and a training that ends when validation no longer improves; then BLEU, chrF and
three translations of lines that were held out.  The same call goes on from where the last one was stopped, and with
--translate it translates.  Each of fairseq's commands is shown before it runs, and can be repeated by hand; what it
prints in training is in OUT/ARCH/train.log, which plot-loss draws.  How much text: of image captions (Multi30k, English
to German, examples/multi30k) 29 000 lines took an hour or two on one CPU core and gave 38.3 BLEU; 2000 lines took two
minutes of two free cores, ten of a busy one, and gave 15.9 BLEU, halting translations.  Longer and more varied lines
need more of both.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_plugins.cli.arguments import add_user_dir, positive
from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.cli.own_data.translations import score_held_out, translate
from fairseq_plugins.cli.prepare.corpus import Corpus, prepare
from fairseq_plugins.cli.prepare.download import digest
from fairseq_plugins.cli.prepare.originals import File, Texts
from fairseq_plugins.cli.user_dir import USER_DIR
from fairseq_plugins.cli.work import work_in

if TYPE_CHECKING:
    from fairseq_plugins.cli.own_data.training import Training

FAMILIES = ("convs2s", "weighted_transformer", "conv_encoder")  # of this plugin, as their architectures begin
BEGUN, FINISHED = "begun", "finished"  # beside the checkpoints, with the options of --train


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="text, a sentence a line (train.en), or a folder of such files (en)"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="its translation, line by line")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for everything that is made")
    parser.add_argument("--arch", default="convs2s_iwslt_de_en", help="architecture (default: %(default)s)")
    add_user_dir(parser, default=USER_DIR)
    parser.add_argument("--source-lang", metavar="XX", help="source language (default: the end of SOURCE's name)")
    parser.add_argument("--target-lang", metavar="XX", help="target language (default: the end of TARGET's name)")
    parts = {"valid": "validation part (default: held out)", "test": "test part, to be scored"}
    for part, meaning in parts.items():
        parser.add_argument(f"--{part}", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help=meaning)
    parser.add_argument(
        "--translate", metavar="FILE", help="only translate a text, or - for stdin, with the trained model"
    )
    parser.add_argument(
        "--train",
        default="",
        metavar="'OPTIONS'",
        help="options of fairseq-train, but for --log-format, that win over those chosen here; a single one as "
        "--train=--fp16",
    )
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes that prepare the text")


def run(args: Namespace) -> None:
    """Prepare, train and translate.

    Raises:
        ValueError: texts do not fit together, an option is wrong, there is no model yet to translate with, another call
            is at work in the folder, or a command of fairseq fails.
        OSError: a text cannot be read.
    """
    if odd := re.search(r"[,:\\]|\$\{", str(args.output)):
        raise ValueError(f"{args.output}: fairseq takes {odd[0]} for no part of a folder's name; choose another one")
    if args.translate == "-" and sys.stdin is None:
        raise ValueError("--translate -: the standard input is closed")
    if args.translate not in (None, "-"):
        refuse_no_text(Path(args.translate))
    model = args.output / args.arch
    if args.translate is not None and not is_trained(model):
        raise ValueError(f"--translate: there is no trained model in {model}; the call without --translate trains one")
    if model.exists() and not (args.output / "settings").exists():
        raise ValueError(f"{model} is in the way of what is to be made under that name; choose another folder")
    for path in (args.source, args.target, *(args.valid or ()), *(args.test or ())) if args.translate is None else ():
        if not path.exists():
            raise ValueError(f"{path} does not exist")
    training = plan(args, model)
    binary, (source, target) = args.output / "data-bin", languages_of(args)
    told = ["--source-lang", source, "--target-lang", target]
    decoding = [binary, *told, "--user-dir", args.user_dir, "--path", model / "checkpoint_best.pt", "--beam", 5]
    decoding += ["--task", "translation_fast", "--tokenizer", "moses"]
    bpe = ["--bpe", "subword_nmt", "--bpe-codes", args.output / "code"]
    if args.translate is not None:  # which several may do at a time, wherever the texts are by now
        if not (binary / f"train.{source}-{target}.{source}.idx").exists():
            raise ValueError(f"--translate: {binary} was not made for {source} to {target}")
        translate(args.translate, [*decoding, *bpe])
        return
    corpus = describe(args)
    with work_in(args.output):
        prepare(corpus, args.output, Path(), workers=args.workers)
        if training is not None:
            with parallel_text.writing(model / BEGUN) as file:
                file.write(f"{args.train}\n")
            training.run(binary, args.output / f"train.{target}", told)
            (model / BEGUN).replace(model / FINISHED)
        try:
            score_held_out(corpus, args.output, model, decoding)
        finally:  # there is a model, also where it cannot be scored
            show_what_next(args, model, binary, [*decoding, *bpe])


def show_what_next(args: Namespace, model: Path, binary: Path, decoding: list[object]) -> None:
    """Commands that one may want next."""
    exported = ["fairseq-plugins", "export", model / "checkpoint_best.pt", args.output / f"{args.arch}.exported"]
    exported += ["--data", binary, "--bpe-codes", args.output / "code", "--tokenizer", "moses"]
    show("The curve of the losses", ["fairseq-plugins", "plot-loss", model, "--output", model / "loss.png"])
    show("Translations, by the same call with --translate FILE or", ["fairseq-interactive", *decoding])
    if args.user_dir != USER_DIR:
        exported += ["--user-dir", args.user_dir]
    if args.arch.startswith(FAMILIES):
        show("A folder that translates without fairseq and torch", exported)


def show(what: str, words: list[object]) -> None:
    """Print a command under what it is for."""
    print(f"\n{what}:\n\n$ {shlex.join(map(str, words))}", file=sys.stderr)


def refuse_no_text(path: Path) -> None:
    """What is to be translated is there and, as far as it can be read twice, neither gzipped nor in UTF-16.

    Raises:
        ValueError: it is not.
    """
    if not path.exists() or path.is_dir():
        raise ValueError(f"--translate: there is no file {path}")
    if not path.is_file():  # a pipe, as of <(zcat text.gz)
        return
    with path.open("rb") as file:
        if file.read(2) in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"--translate: {path} is no plain text in UTF-8")


def is_trained(model: Path) -> bool:
    """Whether a training has ended there, and what it has left is still there."""
    return (model / FINISHED).exists() and (model / "checkpoint_best.pt").exists()


def plan(args: Namespace, model: Path) -> Training | None:
    """The training that is to be made; None where it has been.

    Raises:
        ValueError: an option of it is wrong, or it has been made, or begun, with other ones.
    """
    try:
        wishes = shlex.split(args.train)
    except ValueError as error:
        raise ValueError(f"--train: {error}: {args.train}") from None
    trained = is_trained(model)
    record = model / (FINISHED if trained else BEGUN)
    before = record.read_text(encoding="utf-8") if record.exists() else ""
    others = f"with --train {shlex.quote(before.strip())}" if before and shlex.split(before) != wishes else ""
    if trained and wishes and others:
        raise ValueError(f"{model} has been trained, {others}: choose another folder, or remove {model} to train anew")
    if not trained and (model / "checkpoint_last.pt").exists() and others:  # as after a crash for want of memory
        raise ValueError(
            f"{model} is half trained, {others}: give that again, or remove {record} to go on with other options"
        )
    if trained:
        return None
    from fairseq_plugins.cli.own_data.training import Training  # noqa: PLC0415  (with torch and fairseq: seconds)

    return Training(args.arch, model, wishes, args.user_dir)


def languages_of(args: Namespace) -> tuple[str, str]:
    """Source and target language.

    Raises:
        ValueError: one is missing or no name, or both are one.
    """
    languages = (
        args.source_lang or language_of(args.source, "--source-lang"),
        args.target_lang or language_of(args.target, "--target-lang"),
    )
    for language in languages:
        if not re.fullmatch(r"\w[\w-]*", language) or language == "reference":  # as test.reference
            raise ValueError(f"{language!r} is no name of a language, as en or pt-BR are")
    if languages[0] == languages[1]:
        raise ValueError(f"source and target language are both {languages[0]}: give --source-lang and --target-lang")
    return languages


def describe(args: Namespace) -> Corpus:
    """The corpus that the options name, with as many merges as its size bears.

    Raises:
        ValueError: a language is missing, folders hold different files, or files different numbers of lines.
    """
    languages = languages_of(args)
    train = pair_up(args.source, args.target, languages)
    pairs = count_pairs(train, languages)
    if pairs < 20:
        raise ValueError(f"{args.source} has {pairs} sentences, too few to learn from")
    valid, test = (pair_up(texts[0], texts[1], languages) if texts else () for texts in (args.valid, args.test))
    for part in (valid, test):
        if part and not count_pairs(part, languages):
            raise ValueError(f"{part[0][0].place()} is empty")
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
            sum(1 for _ in parallel_text.read_text(file.place(), language))
            for file, language in zip(text, languages, strict=True)
        ]
        if lines[0] != lines[1]:
            places = [file.place() for file in text]
            raise ValueError(f"{places[0]} has {lines[0]} lines and {places[1]} {lines[1]}: line must match line")
        pairs += lines[0]
    return pairs


def language_of(path: Path, option: str) -> str:
    """``de`` of ``train.de``, ``train.de.gz`` or a folder ``de``; a region or a script may follow, as in ``pt-BR``.

    Raises:
        ValueError: the name ends otherwise.
    """
    name = path.name.removesuffix(".gz").rpartition(".")[2]
    if not re.fullmatch("[a-z]{2,3}([-_]([A-Z]{2}|[A-Z][a-z]{3}))?", name) or name in {"txt", "tsv"}:
        raise ValueError(f"{path}: the name does not end in a language, such as .de; give {option}")
    return name


def pair_up(source: Path, target: Path, languages: tuple[str, str]) -> Texts:
    """The two files, or the files of two folders by their names but for the language.

    Raises:
        ValueError: one is a folder and one is not, a file has no partner, or two have one name.
    """
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
            ends = [at for at, word in enumerate(words) if word.lower() == language.lower()]
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
    return File(path.name, checksum=f"sha256:{digest(path, 'sha256')}", folder=str(path.absolute().parent))
