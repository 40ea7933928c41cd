"""``fairseq-plugins own-data``: from two files or folders of parallel text to translations.

Cleaned text, subwords, fairseq's binary data, and a training that ends when validation no longer improves; then BLEU,
chrF and three translations of lines that were held out.  The same call goes on from where the last one was stopped, and
with --translate it translates.  Text is a file for each language with a sentence a line, gzipped or not (train.en and
train.pt-BR.gz), or a folder of such files for each language (en and zh); a translation memory (.tmx) or gettext
catalogue (.po), or a folder of them, alone, with both languages; test sets of WMT and IWSLT (.sgm, .xml).  Duplicates,
untranslated, very long and broken pairs are left out, each kind with its number; no held-out source is trained on.
Each of fairseq's commands is shown before it runs, and can be repeated by hand; what it prints in training is in
OUT/ARCH/train.log, which plot-loss draws.  How much text: of image captions (Multi30k, English to German,
examples/multi30k) 29 000 lines take about an hour on one CPU core; longer and more varied lines need more of both.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_plugins.cli.arguments import add_user_dir, positive
from fairseq_plugins.cli.files import work_in
from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.cli.own_data.cleaning import OPTIONAL, RULES
from fairseq_plugins.cli.own_data.folder import BEST, SETTINGS, TOKENIZERS, Folder, existing, prepare
from fairseq_plugins.cli.own_data.model_card import CARD, write_card
from fairseq_plugins.cli.own_data.texts import FilePair, languages_of, pair_up
from fairseq_plugins.cli.own_data.trained import FINISHED, Base, find_base, is_trained, trained_archs, without_ends
from fairseq_plugins.cli.own_data.translations import compare_with_base, score_held_out, translate
from fairseq_plugins.cli.user_dir import USER_DIR

if TYPE_CHECKING:
    from fairseq_plugins.cli.own_data.training import Training

BEGUN = "begun"  # before it is `FINISHED`
DEFAULT_ARCH = "convs2s_iwslt_de_en"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="text, a sentence a line (train.en), or a folder of such files (en)"
    )
    parser.add_argument(
        "target",
        type=Path,
        nargs="?",
        metavar="TARGET",
        help="its translation, line by line; left out if SOURCE holds both languages (.tmx, .po)",
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for everything that is made")
    parser.add_argument("--arch", help=f"architecture (default: {DEFAULT_ARCH}, or that of --from)")
    add_user_dir(parser, default=USER_DIR)
    parser.add_argument("--source-lang", metavar="XX", help="source language (default: told by SOURCE)")
    parser.add_argument("--target-lang", metavar="XX", help="target language (default: told by TARGET)")
    parts = {"valid": "validation part (default: held out)", "test": "test part, to be scored"}
    for part, meaning in parts.items():
        parser.add_argument(
            f"--{part}", nargs="+", type=Path, metavar=("SOURCE", "TARGET"), help=f"{meaning}; one file for .tmx or .po"
        )
    parser.add_argument(
        "--tokenizer",
        choices=TOKENIZERS,
        help="how text becomes subwords: sentencepiece gives all text back unchanged and suits any language; moses, "
        "with BPE of subword-nmt, is that of the papers (default: sentencepiece, or what OUT was begun with)",
    )
    parser.add_argument(
        "--keep",
        nargs="+",
        choices=OPTIONAL,
        default=[],
        metavar="RULE",
        help="rules of cleaning that are not applied: "
        + "; ".join(f"{rule} (pairs that {RULES[rule]})" for rule in OPTIONAL),
    )
    parser.add_argument(
        "--from",
        dest="base",
        type=Path,
        metavar="OUT2",
        help="adapt a trained model, of own-data's folder OUT2 or a checkpoint in it, to this text, with its subwords",
    )
    parser.add_argument(
        "--translate",
        metavar="FILE",
        help="only translate a text, or - for stdin, with the trained model; of a catalogue (.po) the empty entries, "
        "marked fuzzy",
    )
    parser.add_argument(
        "--train",
        default="",
        metavar="'OPTIONS'",
        help="options of fairseq-train, but for --log-format, that win over those chosen here; a single one as "
        "--train=--bf16, which is faster on a CPU that multiplies bfloat16 in hardware (avx512_bf16)",
    )
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes that prepare the text")


def run(args: Namespace) -> None:
    """Prepare, train and translate.

    Raises:
        ValueError: texts do not fit together, an option is wrong, there is no model yet to translate with, another call
            is at work in the folder, or a command of fairseq fails.
        OSError: a text cannot be read.
    """
    base = find_base(args.base, args.arch) if args.base else None
    args.arch = args.arch or (base.arch if base else DEFAULT_ARCH)
    texts, model = check(args), args.output / args.arch
    begun = existing(args.output)
    if args.translate is not None and begun is not None and args.target is None:  # the texts may be elsewhere by now
        languages = begun.languages
    else:
        languages = languages_of(*texts["train"], args.source_lang, args.target_lang)
    folder = Folder(args.output, languages, choose_tokenizer(args.tokenizer, begun, base))
    if base is not None and base.folder.languages != languages:
        raise ValueError(
            f"--from {args.base} translates {' to '.join(base.folder.languages)}: not {' to '.join(languages)}"
        )
    told = ["--source-lang", languages[0], "--target-lang", languages[1]]
    decoding = folder.decoding_options(model / BEST, args.user_dir)
    if args.translate is not None:  # which several may do at a time, wherever the texts are by now
        if not (folder.binary / f"train.{languages[0]}-{languages[1]}.{languages[0]}.idx").exists():
            raise ValueError(f"--translate: {folder.binary} was not made for {languages[0]} to {languages[1]}")
        translate(args.translate, decoding)
        return
    paired = {part: pair_up(*files, languages) for part, files in texts.items()}
    training = plan(args, model, base)
    with work_in(args.output):
        prepare(folder, paired, set(args.keep), args.workers, base.folder if base else None)
        if training is not None:
            with parallel_text.writing(model / BEGUN) as file:
                file.write(f"{args.train}\n")
            training.run(folder.binary, folder.segmented("train")[1], told)
            (model / BEGUN).replace(model / FINISHED)
        commands = next_commands(args, folder, model, decoding)
        try:
            scores = score_held_out(folder, model, decoding)
            if training is not None or not (model / CARD).exists():  # users may edit it
                write_card(folder, model, scores, base, commands)
            if base is not None:
                compare_with_base(scores, folder, model, base, args.user_dir)
        finally:  # there is a model, also where it cannot be scored
            for what, words in commands.items():
                print(f"\n{what}:\n\n$ {words}", file=sys.stderr)


def check(args: Namespace) -> dict[str, FilePair]:
    """Return source and target of each part that is given.

    Raises:
        ValueError: a name cannot be used, a file is missing, or there is no model yet to translate with.
    """
    if odd := re.search(r"[,:\\]|\$\{", str(args.output)):
        raise ValueError(f"{args.output}: fairseq does not accept {odd[0]} in a folder's name; choose another name")
    if args.translate == "-" and sys.stdin is None:
        raise ValueError("--translate -: the standard input is closed")
    if args.translate not in (None, "-"):
        refuse_no_text(Path(args.translate))
    model = args.output / args.arch
    if args.translate is not None and not is_trained(model):
        archs = trained_archs(args.output)
        instead = f"give --arch {' or '.join(archs)}" if archs else "the call without --translate trains one"
        raise ValueError(f"--translate: there is no trained model in {model}; {instead}")
    if model.exists() and not (args.output / SETTINGS).exists():
        raise ValueError(f"{model} already exists and was not created by own-data: choose another folder")
    texts = {part: files for part in ("train", "valid", "test") if (files := files_of(args, part))}
    if args.translate is None:
        for path in (path for files in texts.values() for path in files):
            if not path.exists():
                raise ValueError(f"{path} does not exist")
    return texts


def files_of(args: Namespace, part: str) -> FilePair | None:
    """Return the source and target files of a part; one file that holds both languages is both.

    Raises:
        ValueError: a part has more than two files.
    """
    files = (args.source, args.target or args.source) if part == "train" else getattr(args, part)
    if files is None:
        return None
    if len(files) > 2:
        raise ValueError(f"--{part}: expected SOURCE and TARGET, got {len(files)} files")
    return files[0], files[-1]


def choose_tokenizer(wished: str | None, begun: Folder | None, base: Base | None) -> str:
    """Return how text becomes subwords in a folder that may have been begun, with a model that may be another's.

    Raises:
        ValueError: another one is asked for.
    """
    for folder in (begun, base.folder if base else None):
        if folder is not None:
            if wished not in (None, folder.tokenizer):
                raise ValueError(f"--tokenizer {wished}: {folder.path} has text for {folder.tokenizer}")
            wished = folder.tokenizer
    return wished or TOKENIZERS[0]


def next_commands(args: Namespace, folder: Folder, model: Path, decoding: list[object]) -> dict[str, str]:
    """Return commands that one may want next, by what they are for."""
    from fairseq_plugins.cli.own_data.training import is_exportable  # noqa: PLC0415  (with torch and fairseq: seconds)

    commands: dict[str, list[object]] = {
        "The curve of the losses": ["fairseq-plugins", "plot-loss", model, "--output", model / "loss.png"],
        "Translations, by own-data with --translate FILE too": ["fairseq-interactive", *decoding],
    }
    exported = ["fairseq-plugins", "export", model / BEST, args.output / f"{args.arch}.exported"]
    exported += folder.export_options()
    if args.user_dir != USER_DIR:
        exported += ["--user-dir", args.user_dir]
    if is_exportable(args.arch, args.user_dir):
        commands["A folder that translates without fairseq and torch"] = exported
    return {what: shlex.join(map(str, words)) for what, words in commands.items()}


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


def plan(args: Namespace, model: Path, base: Base | None = None) -> Training | None:
    """Return the training that is to be made; None if it has been.

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
    same = without_ends(shlex.split(before)) == without_ends(wishes)
    others = f"with --train {shlex.quote(before.strip())}" if before and not same else ""
    if trained and wishes and others:
        raise ValueError(f"{model} has been trained, {others}: choose another folder, or remove {model} to train again")
    if not trained and (model / "checkpoint_last.pt").exists() and others:  # as after a crash for want of memory
        raise ValueError(
            f"{model} is half trained, {others}: give that again, or remove {record} to go on with other options"
        )
    if trained and (not before or not wishes or shlex.split(before) == wishes):  # else it is to end later
        return None
    from fairseq_plugins.cli.own_data.training import Training  # noqa: PLC0415  (with torch and fairseq: seconds)

    return Training(args.arch, model, wishes, args.user_dir, base)
