"""Options that a command cannot do are refused before it starts, by the option's name."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq import options
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.compat import refusals
from fairseq_plugins.compat.training_options import LIMITS
from tests.commands import QUIET, TRAINING, USER_DIR, run
from tests.conftest import ARCHITECTURES

PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "validate": options.get_validation_parser,
}
OURS = f"--arch {ARCHITECTURES[0]}"
MULTILINGUAL = "--task multilingual_translation --lang-pairs a-b --arch"

# A command line, and the option that its refusal begins with.
REFUSED = [
    (f"train {OURS} --seed -1", "--seed"),
    (f"train {OURS} --clip-norm nan", "--clip-norm"),
    (f"train {OURS} --lr 0.1,-0.1", "--lr"),
    (f"train {OURS} --update-freq 1,0", "--update-freq"),
    (f"train {OURS} --optimizer adam --adam-eps nan", "--adam-eps"),
    (f"train {OURS} --optimizer nag --momentum 2", "--momentum"),
    (f"train {OURS} --criterion label_smoothed_cross_entropy --label-smoothing 2", "--label-smoothing"),
    ("train --arch transformer_tiny --dropout 1.5", "--dropout"),
    ("generate --max-tokens 0", "--max-tokens"),
    (f"train {OURS} --optimizer adam --adam-betas (2,3)", "--adam-betas"),
    (f"train {OURS} --optimizer adam --adam-betas 0.9", "--adam-betas"),
    (f"train {OURS} --optimizer adam --adam-betas (0.9,nan)", "--adam-betas"),
    (f"train {OURS} --lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates"),
    (f"train {OURS} --best-checkpoint-metric bleu --keep-best-checkpoints 2", "--best-checkpoint-metric"),
    (f"train {OURS} --maximize-best-checkpoint-metric", "--best-checkpoint-metric"),
    (f"train {OURS} --best-checkpoint-metric ppl --maximize-best-checkpoint-metric", "--best-checkpoint-metric"),
    (
        f"train {OURS} --criterion sequence_risk --best-checkpoint-metric best --maximize-best-checkpoint-metric",
        "--best-checkpoint-metric",
    ),
    (f"train --task language_modeling {OURS}", "--task"),
    (f"train --task cross_lingual_lm {OURS}", "--task"),  # its options are in fairseq's old way
    (f"train {MULTILINGUAL} {ARCHITECTURES[0]}", "--task"),
    (f"train --criterion adaptive_loss {OURS}", "--criterion"),
    (f"train --tpu {OURS}", "--tpu"),
    ("validate --path x", "--task"),
    ("generate --tokenizer moses --source-lang src", "--tokenizer"),
    ("interactive --tokenizer moses", "--tokenizer"),
    ("generate --num-shards 2", "--num-shards"),
    ("generate --replace-unk --remove-bpe", "--replace-unk"),
    ("interactive --score-reference", "--score-reference"),
    ("interactive --prefix-size 1", "--prefix-size"),
    ("generate --beam 0", "--beam"),
    ("generate --print-step", "--print-step"),
    ("interactive --retain-iter-history", "--retain-iter-history"),
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
    f"train {OURS}",
    f"train {MULTILINGUAL} multilingual_transformer",
    f"train --task translation_multi_simple_epoch {OURS} --max-source-positions 9 --max-target-positions 9",
    "train --criterion adaptive_loss --arch transformer_tiny --adaptive-softmax-cutoff 8",
    "train --criterion adaptive_loss --arch fconv_lm_dauphin_wikitext103 --task language_modeling",
    "validate --path x --task translation",
    "generate --tokenizer moses --source-lang src --target-lang tgt",
    "generate --print-step --task translation_lev",
    "generate --prefix-size 1 --score-reference",
    "interactive --replace-unk",
    "generate --task translation_fast --word-penalty 1 --sampling",
]


def parse(line: str) -> Namespace:
    command, *words = line.split()
    return options.parse_args_and_arch(PARSERS[command](), ["data", *words])


@pytest.mark.parametrize(("line", "option"), REFUSED)
def test_refused(line: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}[ :]"):
        parse(line)


@pytest.mark.parametrize("line", TAKEN)
def test_taken(line: str) -> None:
    assert refusals.command_of(parse(line)) == line.split(maxsplit=1)[0]


@pytest.mark.parametrize("option", LIMITS)
def test_values_beyond_the_limits_of_an_option_are_refused(option: str) -> None:
    least, most = LIMITS[option]
    for value in {least - 1, most + 1, math.nan, math.inf, -math.inf}:
        for given in (value, [1.0, value]):
            with pytest.raises(ValueError, match=f"^--{option.replace('_', '-')} must be "):
                refusals.refuse("train", {option: given})
    for value in {least, most, 1} - {-math.inf, math.inf}:
        refusals.refuse("train", {option: value})


def test_every_refusal_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for refusal in refusals.REFUSALS:
        monkeypatch.setattr(refusals, "REFUSALS", [refusal])
        refused = []
        for line, _ in REFUSED:
            try:
                parse(line)
            except ValueError as error:
                refused.append(error)
        assert any(not str(error).startswith("--task is missing") for error in refused), refusal.sentence


@pytest.mark.parametrize("command", ["train", "generate", "interactive"])
def test_commands_refuse_before_they_start(data: Path, command: str) -> None:
    words = {"train": [OURS, "--criterion adaptive_loss"]}.get(command, ["--path none.pt", "--beam 0"])
    words = [data, "--user-dir", USER_DIR, *" ".join(words).split()]
    assert re.match(r"ValueError: --(criterion|beam) ", run(command, *words, succeeds=False).stderr.splitlines()[-1])


def test_hydra_refuses_before_it_trains(data: Path, tmp_path: Path) -> None:
    options = ["task=translation", f"task.data={data}", "criterion=adaptive_loss", f"common.user_dir={USER_DIR}"]
    options += [f"+model._name={ARCHITECTURES[0]}", "optimizer=adam", "lr_scheduler=fixed", "dataset.batch_size=16"]
    error = run("hydra_train", *options, f"hydra.run.dir={tmp_path}", succeeds=False).stderr
    assert "\nValueError: --criterion adaptive_loss" in error


def test_generators_refuse_from_python(dictionary) -> None:
    task = TranslationTask(TranslationConfig(), dictionary, dictionary)
    with pytest.raises(ValueError, match=r"^--beam "):
        task.build_generator([], Namespace(beam=0))


def test_adaptive_loss_goes_with_fairseqs_transformer(data: Path) -> None:
    options = ["--arch", "transformer_tiny", "--adaptive-softmax-cutoff", 8, "--max-update", 1, "--no-save"]
    options += ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", *TRAINING, *QUIET]
    run("train", data, "--user-dir", USER_DIR, *options)
