"""The table of refusals: each refusal names its option before the command starts."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq import options
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.common.options import Range
from fairseq_plugins.repairs import refusals
from tests.commands import USER_DIR, run
from tests.conftest import ARCHITECTURES

PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "validate": options.get_validation_parser,
    "eval-lm": options.get_eval_lm_parser,
}
OURS = f"--arch {ARCHITECTURES[0]}"

# Each command line is followed by the option that its refusal begins with.
REFUSED = [
    (f"train {OURS} --seed -1", "--seed"),
    (f"train {OURS} --lr 0.1,-0.1", "--lr"),
    (f"train {OURS} --update-freq 1,0", "--update-freq"),
    (f"train {OURS} --lr-scheduler cosine --max-update 9 --min-lr nan", "--min-lr"),
    ("train --arch transformer_tiny --dropout 1.5", "--dropout"),
    (f"train {OURS} --optimizer adam --adam-betas (2,3)", "--adam-betas"),
    (f"train {OURS} --optimizer adam --adam-betas 0.9", "--adam-betas"),
    (f"train {OURS} --lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates"),
    (f"train {OURS} --best-checkpoint-metric bleu --keep-best-checkpoints 2", "--best-checkpoint-metric"),
    (f"train {OURS} --maximize-best-checkpoint-metric", "--best-checkpoint-metric"),
    (f"train {OURS} --best-checkpoint-metric ppl --maximize-best-checkpoint-metric", "--best-checkpoint-metric"),
    (
        f"train {OURS} --criterion sequence_risk --best-checkpoint-metric best --maximize-best-checkpoint-metric",
        "--best-checkpoint-metric",
    ),
    (f"train {OURS} --ddp-backend slowmo", "--ddp-backend"),
    ("train", "--arch"),
    ("validate --path x", "--task"),
    ("generate --tokenizer moses --source-lang src", "--tokenizer"),
    ("generate --replace-unk --remove-bpe", "--replace-unk"),
    *((f"generate --replace-unk {data}", "--replace-unk") for data in ("", "--dataset-impl mmap")),
    ("generate --nbest 6 --beam 5", "--nbest"),
    ("generate --min-len 10 --max-len-b 5", "--min-len"),
    ("generate --max-len-b 0", "--min-len"),
    ("generate --lenpen 2 --unnormalized", "--lenpen"),
    *((f"generate --unkpen={value}", "--unkpen") for value in ("nan", "-inf")),
    ("generate --sampling --sampling-topk 5 --sampling-topp 0.5", "--sampling-topk"),
    ("generate --diverse-beam-groups 5", "--diverse-beam-groups"),
    (f"train {OURS} --max-tokens 0", "--max-tokens"),
    ("generate --constraints", "--constraints"),
    ("interactive --print-alignment soft", "--print-alignment"),
    ("interactive --bpe subword_nmt", "--bpe"),
    ("generate --sampling --diversity-rate 0", "--sampling"),
    ("interactive --constraints --match-source-len", "--constraints"),
    ("generate --lm-weight 0.5", "--lm-weight"),
    ("generate --retain-dropout-modules X", "--retain-dropout-modules"),
    ("generate --batch-size 8 --batch-size-valid 4", "--batch-size-valid"),
    ("validate --task translation --path x --max-tokens-valid 9", "--max-tokens-valid"),
    ("generate --sacrebleu", "--sacrebleu"),
    ("generate --task translation_fast --word-penalty 1 --sampling --sampling-topp 0.5", "--word-penalty"),
]

TAKEN = [
    f"train {OURS} --lr 0 --clip-norm 0 --max-update 0 --patience -1 --stop-time-hours 0",
    f"train {OURS} --optimizer adam --adam-betas (0,0.98) --lr-scheduler inverse_sqrt --warmup-updates 1",
    f"train {OURS} --lr-scheduler polynomial_decay --total-num-update 9",
    f"train {OURS} --best-checkpoint-metric bleu --maximize-best-checkpoint-metric",
    f"train {OURS} --best-checkpoint-metric nll_loss",
    f"train {OURS} --criterion sequence_risk --best-checkpoint-metric best",
    f"train {OURS} --best-checkpoint-metric bsz --maximize-best-checkpoint-metric",
    f"train {OURS} --best-checkpoint-metric best --maximize-best-checkpoint-metric",
    f"train {OURS}",
    "validate --path x --task translation",
    "eval-lm --path x --gen-subset valid --num-shards 2",
    "generate --tokenizer moses --source-lang src --target-lang tgt",
    "generate --prefix-size 1 --score-reference",
    "interactive --replace-unk",
    "generate --replace-unk --dataset-impl raw",
    "interactive --bpe subword_nmt --bpe-codes x",
    "generate --sacrebleu --scoring sacrebleu",
    "generate --task translation_fast --word-penalty 1 --sampling",
    "generate --nbest 5 --lenpen=-0.5 --unkpen inf --min-len 0 --max-len-a 1.2 --max-len-b 0 --temperature 0.5",
    "generate --sampling --sampling-topp 1 --nbest 5 --no-repeat-ngram-size 0 --prefix-size 0",
    "generate --max-tokens 9 --batch-size 8 --gen-subset valid --quiet --results-path x",
    "interactive --constraints --lm-weight 0",
    f"train {OURS} --batch-size 8 --batch-size-valid 4 --max-tokens-valid 9 --valid-subset test --bf16",
]


def parse(line: str) -> Namespace:
    command, *words = line.split()
    return options.parse_args_and_arch(PARSERS[command](), ["data", *words])


@pytest.mark.parametrize(("line", "option"), REFUSED)
def test_refused(line: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}[ :]"):
        parse(line)


@pytest.mark.parametrize("line", TAKEN)
def test_accepted(line: str) -> None:
    assert refusals.command_of(parse(line)) == line.split(maxsplit=1)[0]


@pytest.mark.parametrize("line", [f"train {OURS}", "validate --task translation --path x", "generate", "interactive"])
def test_every_unread_option_is_refused(line: str) -> None:
    command = line.split(maxsplit=1)[0]
    for option in " ".join(names for commands, names, _ in refusals.UNREAD if command in commands).split():
        args = parse(line)
        assert option in args
        vars(args)[option] = "another value"
        with pytest.raises(ValueError, match=f"^{refusals.flag(option)} "):
            refusals.refuse(command, args)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"beam": 0}, "beam"),
        ({"beam": 2.5}, "beam"),
        ({"beam": 5.0}, "beam"),
        ({"beam": True}, "beam"),
        ({"lenpen": float("nan")}, "lenpen"),
        ({"lenpen": "1"}, "lenpen"),
        ({"unkpen": "1"}, "unkpen"),
        ({"sampling": True, "sampling_topk": 1000}, "sampling-topk"),
    ],
)
def test_generators_refuse_from_python(dictionary, options: dict[str, object], name: str) -> None:
    task = TranslationTask(TranslationConfig(), dictionary, dictionary)
    with pytest.raises(ValueError, match=f"^--{name} "):
        task.build_generator([], Namespace(**options))


RANGES = [("train", option, allowed) for option, allowed in refusals.TRAINING.items()]
RANGES += [("task.build_generator", option, allowed) for option, allowed in refusals.SEARCH.items()]
RANGES += [(commands[-1], *whole) for commands, table in refusals.WHOLE.items() for whole in table.items()]


@pytest.mark.parametrize(("command", "option", "allowed"), RANGES)
def test_values_outside_the_range_of_an_option_are_refused(command: str, option: str, allowed: Range) -> None:
    least, most = allowed.least, allowed.most
    wrong = {least - 1, most + 1, math.nan, math.inf, -math.inf, *([least] if allowed.above else [])}
    for value in wrong - {refusals.DEFAULTS.get(option)}:
        for given in (value, *([[1.0, value]] if command == "train" else [])):
            with pytest.raises(ValueError, match=f"^{refusals.flag(option)} must be "):
                refusals.refuse(command, {option: given})
    for value in {least, most, 1} - wrong:
        refusals.refuse(command, {option: value})


def test_every_refusal_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges and options that a command ignores have separate tests, and so has the size of the vocabulary."""
    tested = {refusal.sentence for refusal in (*refusals.unread(), *refusals.ranges())}
    tested |= {refusal.sentence for refusal in refusals.REFUSALS if "{o.words}" in refusal.sentence}
    for refusal in (each for each in refusals.REFUSALS if each.sentence not in tested):
        monkeypatch.setattr(refusals, "REFUSALS", [refusal])
        refused = []
        for line, _ in REFUSED:
            try:
                parse(line)
            except ValueError as error:
                refused.append(error)
        assert any(not str(error).startswith("--task is missing") for error in refused), refusal.sentence


def test_hydra_refuses_before_it_trains(data: Path, tmp_path: Path) -> None:
    options = ["task=translation", f"task.data={data}", "common.seed=-1", f"common.user_dir={USER_DIR}"]
    options += [f"+model._name={ARCHITECTURES[0]}", "optimizer=adam", "lr_scheduler=fixed", "criterion=cross_entropy"]
    error = run("hydra_train", *options, f"hydra.run.dir={tmp_path}", succeeds=False).stderr
    assert "\nValueError: --seed " in error
