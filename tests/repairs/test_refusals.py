"""The table of refusals: each refusal names its option before the command starts."""

from __future__ import annotations

import itertools
import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq import options
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.repairs import refusals
from fairseq_plugins.repairs.refusals import TRAINING as LIMITS
from tests.commands import USER_DIR, run
from tests.conftest import ARCHITECTURES

PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "validate": options.get_validation_parser,
}
OURS = f"--arch {ARCHITECTURES[0]}"

# Each command line is followed by the option that its refusal begins with.
REFUSED = [
    (f"train {OURS} --seed -1", "--seed"),
    (f"train {OURS} --clip-norm nan", "--clip-norm"),
    (f"train {OURS} --lr 0.1,-0.1", "--lr"),
    (f"train {OURS} --update-freq 1,0", "--update-freq"),
    (f"train {OURS} --optimizer adam --adam-eps nan", "--adam-eps"),
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
    ("interactive --tokenizer moses", "--tokenizer"),
    ("generate --num-shards 2", "--num-shards"),
    ("generate --replace-unk --remove-bpe", "--replace-unk"),
    ("interactive --score-reference", "--score-reference"),
    ("generate --beam 0", "--beam"),
    ("generate --nbest 0", "--nbest"),
    ("generate --nbest 6 --beam 5", "--nbest"),
    ("generate --min-len=-1", "--min-len"),
    ("generate --min-len 10 --max-len-b 5", "--min-len"),
    ("generate --max-len-b=-5", "--max-len-b"),
    ("generate --max-len-b 0", "--min-len"),
    *((f"generate --max-len-a={value}", "--max-len-a") for value in ("nan", "inf", "-1")),
    *((f"interactive --lenpen={value}", "--lenpen") for value in ("nan", "inf", "-inf")),
    ("generate --lenpen 2 --unnormalized", "--lenpen"),
    *((f"generate --unkpen={value}", "--unkpen") for value in ("nan", "-inf")),
    *((f"generate --temperature={value}", "--temperature") for value in ("nan", "inf", "0", "-1")),
    ("generate --task translation_fast --word-penalty nan", "--word-penalty"),
    ("generate --sampling --sampling-topk=-2", "--sampling-topk"),
    ("generate --sampling --sampling-topk 5 --sampling-topp 0.5", "--sampling-topk"),
    *((f"generate --sampling --sampling-topp={value}", "--sampling-topp") for value in ("nan", "1.5", "-0.5")),
    *((f"generate --diversity-rate={value}", "--diversity-rate") for value in ("nan", "inf", "-0.5", "-2")),
    ("generate --diverse-beam-groups 5", "--diverse-beam-groups"),
    ("generate --prefix-size=-1", "--prefix-size"),
    ("generate --lm-path x --lm-weight nan", "--lm-weight"),
    (f"train {OURS} --max-tokens 0", "--max-tokens"),
    ("validate --task translation --path x --max-tokens=-1", "--max-tokens"),
    ("generate --max-tokens 0", "--max-tokens"),
    ("interactive --batch-size=-1", "--batch-size"),
    ("generate --constraints", "--constraints"),
    ("interactive --print-alignment soft", "--print-alignment"),
    ("interactive --bpe subword_nmt", "--bpe"),
    ("generate --sampling --diversity-rate 0", "--sampling"),
    ("interactive --constraints --match-source-len", "--constraints"),
    ("generate --lm-weight 0.5", "--lm-weight"),
    ("generate --retain-dropout-modules X", "--retain-dropout-modules"),
    ("generate --batch-size 8 --batch-size-valid 4", "--batch-size-valid"),
    ("validate --task translation --path x --max-tokens-valid 9", "--max-tokens-valid"),
    # No command reads these options.
    ("generate --sacrebleu", "--sacrebleu"),
    ("generate --bf16", "--bf16"),
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
    "generate --tokenizer moses --source-lang src --target-lang tgt",
    "generate --prefix-size 1 --score-reference",
    "interactive --replace-unk",
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
    for option in itertools.chain(*(unread for commands, unread in refusals.UNREAD.items() if command in commands)):
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
        ({"beam": True}, "beam"),
        ({"lenpen": float("nan")}, "lenpen"),
        ({"lenpen": "1"}, "lenpen"),
        ({"sampling": True, "sampling_topk": 1000}, "sampling-topk"),
    ],
)
def test_generators_refuse_from_python(dictionary, options: dict[str, object], name: str) -> None:
    task = TranslationTask(TranslationConfig(), dictionary, dictionary)
    with pytest.raises(ValueError, match=f"^--{name} "):
        task.build_generator([], Namespace(**options))


@pytest.mark.parametrize("option", LIMITS)
def test_values_outside_the_range_of_an_option_are_refused(option: str) -> None:
    least, most = LIMITS[option].least, LIMITS[option].most
    for value in {least - 1, most + 1, math.nan, math.inf, -math.inf}:
        for given in (value, [1.0, value]):
            with pytest.raises(ValueError, match=f"^--{option.replace('_', '-')} must be "):
                refusals.refuse("train", {option: given})
    for value in {least, most, 1} - {-math.inf, math.inf}:
        refusals.refuse("train", {option: value})


def test_every_refusal_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that a command ignores have a separate test, and so has the size of the vocabulary."""
    tested = {refusal.sentence for refusal in refusals.unread()}
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


@pytest.mark.parametrize("command", ["train", "generate"])
def test_commands_refuse_before_they_start(data: Path, command: str) -> None:
    words = {"train": [OURS, "--seed -1"]}.get(command, ["--path none.pt", "--beam 0"])
    words = [data, "--user-dir", USER_DIR, *" ".join(words).split()]
    assert re.match(r"ValueError: --(seed|beam) ", run(command, *words, succeeds=False).stderr.splitlines()[-1])


def test_hydra_refuses_before_it_trains(data: Path, tmp_path: Path) -> None:
    options = ["task=translation", f"task.data={data}", "common.seed=-1", f"common.user_dir={USER_DIR}"]
    options += [f"+model._name={ARCHITECTURES[0]}", "optimizer=adam", "lr_scheduler=fixed", "criterion=cross_entropy"]
    error = run("hydra_train", *options, f"hydra.run.dir={tmp_path}", succeeds=False).stderr
    assert "\nValueError: --seed " in error
