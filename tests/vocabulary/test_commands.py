"""Vocabulary selection with the real commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import QUIET, TRAINING, USER_DIR, hypotheses, run, shown, train, train_two_processes_as_one

CRITERION = ["--criterion", "vocab_selection_cross_entropy", "--label-smoothing", 0.1]
BLEU = ["--eval-bleu", "--eval-bleu-args", '{"beam": 3}', "--eval-bleu-remove-bpe", "--eval-bleu-detok", "space"]
WORDS = [f"w{number}" for number in range(20)]
FREQUENT = {"w0", "w1", "w2"}


def translations(word: str) -> list[str]:
    """Return three translations for each word but the last, which is not a translation either."""
    number = int(word[1:])
    return [] if number == 19 else [f"w{(number + step) % 19}" for step in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lexicon")
    lines = [f"{word} {other} {1 / 2**place}" for word in WORDS for place, other in enumerate(translations(word))]
    (made / "candidates.txt").write_text("\n".join(["unseen w5 1", *lines, ""]))
    (made / "frequent.txt").write_text("".join(f"{word} 9\n" for word in ["w0", "Unbekannt", *WORDS[1:]]))
    return made


@pytest.fixture
def selection(folder: Path) -> list[object]:
    return options(folder)


def options(folder: Path) -> list[object]:
    """Return options for two of the three translations, and for three frequent words."""
    task = ["--task", "translation_fast", "--candidates", folder]
    return [*task, "--candidates-per-word", 2, "--frequent-candidates", len(FREQUENT)]


@pytest.fixture(scope="module")
def trained(data: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train four epochs without a stop, with validation by BLEU; return folder and output."""
    save = tmp_path_factory.mktemp("trained")
    more = [*options(folder), *CRITERION, *BLEU, "--dropout", 0, "--batch-size", 64, "--max-epoch", 4]
    result = train(data, save, *more)
    return save, result.stdout + result.stderr


def test_log(data: Path, trained: tuple[Path, str]) -> None:
    """Words without a source word are candidates because the references contain them, and do not count as covered."""
    targets = (data.parent / "valid.tgt").read_text()
    count = len(targets.split()) + targets.count("\n")
    found = {other for word in set(targets.split()) for other in translations(word)[:2]} | FREQUENT
    missing = sum(word not in found for word in targets.split())
    assert missing
    valid, train_lines = shown(trained[1], "valid"), shown(trained[1], "train")
    assert len(valid) == len(train_lines) == 4
    for line in valid:
        assert float(line["valid_coverage"]) == pytest.approx(100 * (1 - missing / count), abs=0.01)
        assert float(line["valid_candidates"]) == 4 + len(found | set(targets.split()))
        assert float(line["valid_bleu"]) >= 0
    losses = [float(line["train_nll_loss"]) for line in train_lines]
    assert losses[-1] < losses[0]
    assert float(train_lines[0]["train_candidates"]) <= 24


# fairseq's default multiple of 8 would lose the last sentence with a batch size of 1.
ONE_BY_ONE = ["--batch-size", 1, "--required-batch-size-multiple", 1]


def generate(data: Path, path: Path, *more: object) -> dict[int, list[tuple[float, str]]]:
    result = run("generate", data, "--user-dir", USER_DIR, "--path", path, "--beam", 3, "--nbest", 3, *more)
    found = hypotheses(result.stdout)
    assert sorted(found) == list(range(16))
    return found


def assert_only_candidates(data: Path, found: dict[int, list[tuple[float, str]]]) -> None:
    for number, source in enumerate((data.parent / "test.src").read_text().splitlines()):
        allowed = {other for word in source.split() for other in translations(word)[:2]} | FREQUENT | {"<unk>", "<s>"}
        for _, text in found[number]:
            assert set(text.split()) <= allowed, source


def test_generate(data: Path, trained: tuple[Path, str], selection: list[object]) -> None:
    """With one sentence per batch, its words are its candidates; without candidates, hypotheses have other words."""
    path = trained[0] / "checkpoint_best.pt"
    found = generate(data, path, *selection, *ONE_BY_ONE)
    assert_only_candidates(data, found)
    plain, fast = (generate(data, path, "--task", task) for task in ("translation", "translation_fast"))
    assert plain != found
    assert_near(fast, plain, 2e-5)  # rounding errors depend on the number of rows, which is smaller at the first step
    assert {number: [text for _, text in beams] for number, beams in fast.items()} == {
        number: [text for _, text in beams] for number, beams in plain.items()
    }
    assert_near(generate(data, path, "--task", "translation_fast", "--cpu-dtype", "bfloat16"), plain, 0.3)


def assert_near(found: dict[int, Any], expected: dict[int, Any], tolerance: float) -> None:
    assert [[score for score, _ in found[number]] for number in found] == [
        [pytest.approx(score, abs=tolerance) for score, _ in expected[number]] for number in found
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")
@pytest.mark.slow
def test_generate_with_compiled_steps(data: Path, trained: tuple[Path, str], selection: list[object]) -> None:
    path = trained[0] / "checkpoint_best.pt"
    for more in (["--task", "translation_fast"], [*selection, *ONE_BY_ONE]):
        expected, found = generate(data, path, *more), generate(data, path, *more, "--compile-steps")
        assert [[text for _, text in found[number]] for number in found] == [
            [text for _, text in expected[number]] for number in found
        ]


def test_interactive(data: Path, trained: tuple[Path, str], selection: list[object]) -> None:
    """Unknown words and blank lines have the frequent words; constraints need not be candidates."""
    path, sources = trained[0] / "checkpoint_best.pt", "w3 w4\nnever seen\n\n"
    command = ["interactive", data, "--user-dir", USER_DIR, "--path", path, *selection, "--beam", 3, "--nbest", 3]
    found = hypotheses(run(*command, stdin=sources).stdout)
    assert sorted(found) == [0, 1, 2]
    for number, allowed in enumerate([{"w3", "w4", "w5"}, set(), set()]):
        assert {word for _, text in found[number] for word in text.split()} <= allowed | FREQUENT | {"<unk>", "<s>"}
    found = hypotheses(run(*command, "--constraints", stdin="w3 w4\tw15 w16\n").stdout)
    assert "w15 w16" in found[0][0][1]


@pytest.mark.slow
def test_half_precision(data: Path, selection: list[object], tmp_path: Path) -> None:
    more = [*selection, *CRITERION, "--fp16", "--fp16-init-scale", 4, "--update-freq", 2, "--max-epoch", 3]
    result = train(data, tmp_path, *more)
    losses = [float(line["train_nll_loss"]) for line in shown(result.stdout + result.stderr, "train")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("architecture", ["convs2s_tiny", pytest.param("transformer_tiny", marks=pytest.mark.slow)])
def test_two_processes_are_one_with_twice_the_update_frequency(data, selection, tmp_path, architecture) -> None:
    common = [data, "--user-dir", USER_DIR, "--arch", architecture, *TRAINING, *QUIET, *selection, *CRITERION]
    common += ["--dropout", 0, "--max-epoch", 2]
    first, single, _ = train_two_processes_as_one(tmp_path, *common)
    # Each rank has its own candidates; the log has the mean over both ranks.
    for part in ("train", "valid"):
        lines = [shown(output, part)[-1] for output in (first, single)]
        for name in (f"{part}_candidates", f"{part}_coverage", f"{part}_nll_loss"):
            assert float(lines[0][name]) == pytest.approx(float(lines[1][name]), abs=0.02)
