"""``own-data --metric``: validation by chrF or BLEU of translations as text."""

from __future__ import annotations

import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf
from sacrebleu import BLEU, CHRF

from fairseq_plugins.cli.arguments import USER_DIR
from fairseq_plugins.cli.own_data.folder import Folder, existing, find_base, generate
from fairseq_plugins.cli.own_data.training import Training
from fairseq_plugins.cli.plot_loss import records
from fairseq_plugins.search.validation import TextScorer, log_scores
from tests.cli.test_own_data import own

MODEL = "--encoder-layers '[(64, 3)] * 2' --decoder-layers '[(64, 3)] * 2' --num-workers 0"

NOUNS = [("dog", "Hund"), ("man", "Mann"), ("boat", "Boot"), ("horse", "Pferd")]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Write pairs whose every tenth target, which will be held out, has a character that is split into bytes."""
    folder, generator = tmp_path_factory.mktemp("pairs"), random.Random(1)
    with (folder / "text.en").open("w") as sources, (folder / "text.de").open("w", encoding="utf-8") as targets:
        for number in range(1200):
            (first, erster), (second, zweiter) = generator.choices(NOUNS, k=2)
            rare = chr(0x4E00 + number) if number % 10 == 9 else ""
            sources.write(f"A {first}, and a {second} {number}.\n")
            targets.write(f"Ein {erster}, und  ein {zweiter}{rare} {number}.\n")
    return [folder / "text.en", folder / "text.de"]


def validations(out: Path) -> list[dict[str, str]]:
    log = (out / "convs2s_tiny" / "train.log").read_text()
    return [record for record in records(log) if "valid_loss" in record]


def told(printed: str, name: str) -> list[str]:
    """Return the metric and the comparison in the progress lines."""
    return re.findall(rf"^epoch \d, .*: validation loss [\d.]+, ({name} [\d.]+, [^;\n]+)", printed, re.MULTILINE)


def test_validation_by_chrf(pairs: list[object], tmp_path: Path) -> None:
    """The logged scores equal scores of fairseq-generate's text, and chrF selects the checkpoint."""
    out = tmp_path / "out"
    wishes = f"{MODEL} --no-epoch-checkpoints --max-epoch"  # an average would have another score
    printed = own(*pairs, out, "--arch", "convs2s_tiny", "--fp32", "--metric", "chrf", "--train", f"{wishes} 4").stderr
    scores = [float(record["valid_chrf"]) for record in validations(out)]
    lines = []
    for place, score in enumerate(scores):
        best = max(scores[: place + 1])
        is_new = best not in scores[:place]
        lines.append(f"chrF {score:.2f}, " + ("the best so far" if is_new else f"the best is {best:.2f}"))
    assert told(printed, "chrF") == lines
    assert re.search(r"Estimate for this CPU: about \S+ \S+ per epoch \(validation: at most \S+ s\), ", printed)

    folder, best = existing(out), out / "convs2s_tiny" / "checkpoint_best.pt"
    search = ["--beam", 1, "--max-len-a", 2, "--max-len-b", 10]
    assert max(scores) > 20
    generate(tmp_path, "valid", [*folder.decoding_options(best, USER_DIR), *search])
    found = re.findall(r"^D-(\d+)\t[^\t]*\t(.*)$", (tmp_path / "generate-valid.txt").read_text(), re.MULTILINE)
    texts = [text for _, text in sorted(found, key=lambda line: int(line[0]))]
    references = (out / "text" / "valid.de").read_text().splitlines()
    assert "\u4e09" in references[0]
    record = validations(out)[scores.index(max(scores))]
    for metric, name in ((CHRF(), "valid_chrf"), (BLEU(), "valid_bleu")):
        assert float(record[name]) == pytest.approx(metric.corpus_score(texts, [references]).score, abs=0.02)

    # A resumed training keeps its metric.
    printed = own(*pairs, out, "--arch", "convs2s_tiny", "--train", f"{wishes} 5").stderr
    assert len(told(printed, "chrF")) == 1
    assert float(validations(out)[-1]["valid_best_chrf"]) >= max(scores)

    # Other folders can use the model, which needs no file of validation.
    assert "--metric" not in find_base(out, None).wishes
    card = (out / "convs2s_tiny" / "README.md").read_text()
    assert "--best-checkpoint-metric chrf" in card
    assert str(tmp_path) not in card.partition("## Commands")[0]
    shutil.move(best, tmp_path / "best.pt")
    (out / "subwords.model").unlink()
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "best.pt")])
    assert len(models) == 1


def test_validation_by_bleu_in_bfloat16(pairs: list[object], tmp_path: Path) -> None:
    """Moses' tokens become text, too."""
    wishes = f"{MODEL} --max-epoch 2 --bf16"
    words = [*pairs, tmp_path / "out", "--arch", "convs2s_tiny", "--tokenizer", "moses", "--metric", "bleu"]
    assert len(told(own(*words, "--train", wishes).stderr, "BLEU")) == 2


def test_translations_without_words_have_a_score() -> None:
    """fairseq logs no BLEU for blank translations, so a training that starts with them would have no metric."""
    dictionary = Dictionary()
    reference = torch.tensor([dictionary.add_symbol(word) for word in ("\u2581a", "\u2581b", "\u2581c", "\u2581d")])
    blank = torch.tensor([dictionary.add_symbol("\u2581")])
    cfg = TranslationConfig(eval_bleu_detok="space", eval_bleu_remove_bpe="sentencepiece", target_lang="de")
    scorer = TextScorer(OmegaConf.structured(cfg), dictionary)
    half = pytest.approx(100 * math.exp(1 - 2), abs=0.01)  # the brevity penalty of four words for eight
    for translations, bleu in (([blank], 0), ([blank, reference], half), ([reference, blank], half)):
        with metrics.aggregate(new_root=True) as found:
            for tokens in translations:
                log_scores([scorer.count([tokens], reference[None])])
        assert found.get_smoothed_values()["bleu"] == bleu


@pytest.mark.parametrize("detok", ["space", "bytes"])
def test_unknown_words_do_not_match_those_of_references(detok: str) -> None:
    """The detokeniser ``bytes`` decodes only characters that stand for bytes."""
    dictionary = Dictionary()
    cfg = TranslationConfig(eval_bleu_detok=detok, target_lang="de")
    unknown = torch.tensor([dictionary.unk()] * 4)
    counts = TextScorer(OmegaConf.structured(cfg), dictionary).count([unknown], unknown[None])
    matches = [f"_bleu_{place}" for place in range(2, 6)] + [f"_chrf_{place}" for place in range(2, 18, 3)]
    assert not any(counts[name] for name in matches)


def test_the_metric_chooses_options(tmp_path: Path) -> None:
    """A small text gets more patience, because chrF may fall in the warm-up."""
    for tokenizer in ("sentencepiece", "moses"):
        options = Folder(tmp_path, ("en", "de"), tokenizer).validation_options("chrf")
        for wishes in (["--task", "translation"], ["--best-checkpoint-metric=loss"]):
            with pytest.raises(ValueError, match=f"--train: {wishes[0].partition('=')[0]}"):
                Training("convs2s_tiny", tmp_path, wishes, validation=options)
        training = Training("convs2s_tiny", tmp_path, [], validation=options)
        for tokens, patience in ((3000, 6 + 100 // 3), (1_000_000, 6)):
            settings = training.settings(300, tokens)
            assert settings[settings.index("--patience") + 1] == str(patience)
