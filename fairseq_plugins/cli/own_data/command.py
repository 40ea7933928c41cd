"""Train a translation model on parallel text, score it, and translate with it.

own-data cleans the text, learns subwords, trains until the validation loss stops improving, and scores held-out text.
Run the same command again to resume a stopped training; add --translate to translate.  SOURCE and TARGET are
line-aligned files, plain or gzipped (train.en, train.pt-BR.gz, .sgm, .xml), or folders of such files (en, zh).  A
translation memory (.tmx), a gettext catalogue (.po) or a folder of such files has both languages, so omit TARGET.
Training on 29 000 image captions takes about an hour on one CPU core.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_plugins.cli.arguments import USER_DIR, add_user_dir, positive
from fairseq_plugins.cli.own_data.cleaning import OPTIONAL, RULES, FilePair, languages_of, pair_up
from fairseq_plugins.cli.own_data.folder import (
    BEST,
    FINISHED,
    METRICS,
    TOKENIZERS,
    Base,
    Folder,
    existing,
    find_base,
    is_trained,
    read_record,
    record_of,
    trained_archs,
    without_ends,
)
from fairseq_plugins.cli.own_data.preparation import prepare, refuse_foreign_files
from fairseq_plugins.cli.own_data.results import CARD, compare_with_base, score_held_out, translate, write_card
from fairseq_plugins.cli.parallel_text import writing
from fairseq_plugins.common.files import NO_TEXT, work_in

if TYPE_CHECKING:
    from fairseq_plugins.cli.own_data.training import Training

BEGUN = "begun"  # while the model trains, the file `FINISHED` has this name
DEFAULT_ARCH = "convs2s_iwslt_de_en"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="text, one sentence per line (train.en), or a folder of such files (en)",
    )
    parser.add_argument(
        "target",
        type=Path,
        nargs="?",
        metavar="TARGET",
        help="the translation of each line of SOURCE; omit TARGET if SOURCE contains both languages (.tmx, .po)",
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for all results")
    text, training = parser.add_argument_group("text"), parser.add_argument_group("training")
    text.add_argument("--source-lang", metavar="XX", help="source language (default: from the name of SOURCE)")
    text.add_argument("--target-lang", metavar="XX", help="target language (default: from the name of TARGET)")
    parts = {"valid": "validation text (default: held out of the training text)", "test": "test text to score"}
    for part, meaning in parts.items():
        text.add_argument(
            f"--{part}", nargs="+", type=Path, metavar=("SOURCE", "TARGET"), help=f"{meaning}; one path for .tmx or .po"
        )
    text.add_argument(
        "--tokenizer",
        choices=TOKENIZERS,
        help="preprocessing: sentencepiece works for every language and loses no character; moses is the papers' "
        "preprocessing, with subword-nmt's BPE (default: sentencepiece, or the preprocessing of an existing OUT)",
    )
    text.add_argument(
        "--keep",
        nargs="+",
        choices=OPTIONAL,
        default=[],
        metavar="RULE",
        help="cleaning rules to switch off: " + "; ".join(f"{rule} ({RULES[rule]})" for rule in OPTIONAL),
    )
    text.add_argument(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="number of processes that prepare the text (default: %(default)s)",
    )
    training.add_argument("--arch", help=f"architecture (default: {DEFAULT_ARCH}, or the architecture of --from)")
    add_user_dir(training, default=USER_DIR)
    training.add_argument(
        "--from",
        dest="base",
        type=Path,
        metavar="OUT2",
        help="adapt a trained model to this text: OUT2 is a folder of own-data or a checkpoint in such a folder; the "
        "model's subwords are kept",
    )
    training.add_argument(
        "--train",
        default="",
        metavar="'OPTIONS'",
        help="options of fairseq-train (except --log-format), which override the options that own-data chooses; write "
        "a single option as --train=--cpu",
    )
    training.add_argument(
        "--metric",
        choices=METRICS,
        help="validation metric that selects the best checkpoint and stops the training; for chrf and bleu, the "
        "validation part is translated greedily after each epoch (default: loss, or the metric of the training in OUT)",
    )
    training.add_argument(
        "--fp32",
        action="store_true",
        help="train in float32 (default: float16 on GPUs, bfloat16 on CPUs with bfloat16 instructions)",
    )
    parser.add_argument_group("translation").add_argument(
        "--translate",
        metavar="FILE",
        help="translate a file, or - for standard input, with the trained model; fill the empty entries of a catalogue "
        "(.po) and mark them as fuzzy",
    )


def run(args: Namespace) -> None:
    """Prepare the text, train and score the model, or translate with a trained model."""
    if odd := re.search(r"[,:\\]|\$\{", str(args.output)):
        raise ValueError(f"{args.output}: fairseq does not accept {odd[0]} in a folder's name; choose another name")
    base = find_base(args.base, args.arch) if args.base else None
    args.arch = args.arch or (base.arch if base else DEFAULT_ARCH)
    model = args.output / args.arch
    if args.translate is not None:
        # Without these early checks, an error about deleted training text could hide an error about --translate.
        refuse_no_text(args.translate)
        refuse_untrained(model)
    before, texts = existing(args.output), texts_of(args)
    languages = languages_for(args, before, texts)
    folder = Folder(args.output, languages, choose_tokenizer(args.tokenizer, before, base))
    decoding = folder.decoding_options(model / BEST, args.user_dir)
    if args.translate is not None:  # Translation needs no lock: several processes may translate.
        if before is not None and before.languages != languages:
            raise ValueError(
                f"--translate: {folder.binary} has no data for {languages[0]} to {languages[1]}; check "
                "--source-lang and --target-lang"
            )
        translate(args.translate, decoding)
        return
    if base is not None and base.folder.languages != languages:
        raise ValueError(
            f"--from {args.base}: the model translates {' to '.join(base.folder.languages)}, but the text is "
            f"{' to '.join(languages)}; choose a model for these languages"
        )
    refuse_foreign_files(folder, model)
    paired = {part: pair_up(*files, languages) for part, files in texts.items()}
    training = plan(args, model, folder, base)
    with work_in(args.output):
        prepare(folder, paired, set(args.keep), args.workers, base.folder if base else None)
        if training is not None:
            with writing(model / BEGUN) as file:
                file.write(f"{record_of(args.metric, args.train)}\n")
            options = ["--source-lang", languages[0], "--target-lang", languages[1]]
            training.run(folder.binary, folder.segmented("train")[1], options)
            (model / BEGUN).replace(model / FINISHED)
        commands = next_commands(args, model, decoding)
        try:
            scores = score_held_out(folder, model, decoding)
            if training is not None or not (model / CARD).exists():  # keep a card that the user may have edited
                write_card(folder, model, scores, base, commands)
            if base is not None:
                compare_with_base(scores, folder, model, base, args.user_dir)
        finally:  # the model is usable even if scoring fails
            for what, words in commands.items():
                print(f"\n{what}:\n\n$ {words}", file=sys.stderr)


def refuse_no_text(text: str) -> None:
    """Refuse a file to translate that is missing, gzipped or in UTF-16."""
    path = Path(text)
    if text == "-":
        if sys.stdin is None:
            raise ValueError("--translate -: the standard input is closed; give a file")
    elif not path.exists() or path.is_dir():
        raise ValueError(f"--translate: {path} is not a file; give a text file, or - for standard input")
    elif path.is_file():  # a pipe, such as <(zcat text.gz), is not checked, because it can be read only once
        with path.open("rb") as file:
            if file.read(2) in NO_TEXT:
                raise ValueError(f"--translate: {path} is not plain text in UTF-8; decompress or convert it")


def refuse_untrained(model: Path) -> None:
    """Refuse to translate without a trained model."""
    if not is_trained(model):
        archs = trained_archs(model.parent)
        if (model / BEST).exists():
            raise ValueError(
                f"--translate: the training in {model} is not finished; resume it without --translate, or export "
                f"{model / BEST}"
            )
        instead = f"give --arch {' or '.join(archs)}" if archs else "train it first, without --translate"
        raise ValueError(f"--translate: there is no trained model in {model}; {instead}")


def languages_for(args: Namespace, before: Folder | None, texts: dict[str, FilePair]) -> tuple[str, str]:
    """Return the source and target language; for --translate without TARGET, return the languages of OUT."""
    if args.translate is None or before is None or args.target is not None:
        return languages_of(*texts["train"], args.source_lang, args.target_lang)
    for option, own in zip(("source", "target"), before.languages, strict=True):
        if (given := getattr(args, f"{option}_lang")) not in (None, own):
            raise ValueError(
                f"--{option}-lang {given}: {args.output} has the {option} language {own}; leave out the option"
            )
    return before.languages


def texts_of(args: Namespace) -> dict[str, FilePair]:
    """Return the source and target path of each given part; a path with both languages is returned twice."""
    texts = {"train": (args.source, args.target or args.source)}
    for part in ("valid", "test"):
        if files := getattr(args, part):
            if len(files) > 2:
                raise ValueError(f"--{part}: expected SOURCE and TARGET, got {len(files)} files")
            texts[part] = files[0], files[-1]
    return texts


def choose_tokenizer(wished: str | None, before: Folder | None, base: Base | None) -> str:
    """Return the tokenizer of an existing folder or base model; without either, the user's choice or the default."""
    for folder in (before, base.folder if base else None):
        if folder is not None:
            if wished not in (None, folder.tokenizer):
                raise ValueError(f"--tokenizer {wished}: {folder.path} uses {folder.tokenizer}; omit the option")
            wished = folder.tokenizer
    return wished or TOKENIZERS[0]


def plan(args: Namespace, model: Path, folder: Folder, base: Base | None = None) -> Training | None:
    """Return the training to run, and set ``args.metric``; return None if the training has finished.

    A resumed training needs the options of the earlier call, except limits such as --max-epoch.  Before the first
    checkpoint, all options may change, for example after a crash for lack of memory.
    """
    try:
        wishes = shlex.split(args.train)
    except ValueError as error:
        raise ValueError(f"--train {args.train}: {error}; check the quotes") from None
    trained = is_trained(model)
    record = model / (FINISHED if trained else BEGUN)
    metric, before = read_record(record) if record.exists() else ("loss", [])
    args.metric = args.metric or metric
    if trained and args.metric == metric and wishes in ([], before):
        return None
    is_begun = record.exists() and (trained or (model / "checkpoint_last.pt").exists())
    if is_begun and (metric, without_ends(before)) != (args.metric, without_ends(wishes)):
        options = f"--metric {metric} --train {shlex.quote(shlex.join(before))}"
        if trained:
            raise ValueError(
                f"{model} has been trained with {options}: choose another OUT, or remove {model} to train again"
            )
        raise ValueError(
            f"{model} is partly trained with {options}: repeat these options, or remove {record} to change options"
        )
    from fairseq_plugins.cli.own_data.training import Training  # noqa: PLC0415  (importing fairseq takes seconds)

    return Training(args.arch, model, wishes, args.user_dir, base, args.fp32, folder.validation_options(args.metric))


def next_commands(args: Namespace, model: Path, decoding: list[object]) -> dict[str, str]:
    """Return shell commands that are useful after a training; the keys describe their purposes."""
    from fairseq_plugins.cli.own_data.training import model_of  # noqa: PLC0415  (importing fairseq takes seconds)

    commands: dict[str, list[object]] = {
        "Draw the losses": ["fairseq-plugins", "plot-loss", model, "--output", model / "loss.png"],
        "Translate (or use own-data --translate FILE)": ["fairseq-interactive", *decoding],
    }
    if "onnx_program" in vars(model_of(args.arch, args.user_dir)):
        folder = args.output / f"{args.arch}.exported"
        exported = ["fairseq-plugins", "export", args.output, folder, "--arch", args.arch]
        if args.user_dir != USER_DIR:
            exported += ["--user-dir", args.user_dir]
        commands["Export to a folder that translates without fairseq and PyTorch"] = exported
    return {what: shlex.join(map(str, words)) for what, words in commands.items()}
