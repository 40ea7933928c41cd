"""What is mended in fairseq's search."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from fairseq.ngram_repeat_block import NGramRepeatBlock

from tests.commands import QUIET, USER_DIR, run, shown

LIMITS = ["--max-tokens", 6, "--skip-invalid-size-inputs-valid-test"]


def test_repeated_ngrams_are_blocked_in_the_generators_buffer() -> None:
    """Against the same tokens in a tensor of their own length; fairseq's own looks at the padding behind them."""
    block, tokens = NGramRepeatBlock(3, use_extension=False), torch.tensor([[2, 5, 6, 7, 5, 6], [2, 5, 6, 7, 6, 5]])
    buffer = torch.cat([tokens, torch.ones(2, 4, dtype=torch.long)], dim=1)
    alone, inside = (block(given, torch.zeros(2, 9), bsz=1, beam_size=2, step=5) for given in (tokens, buffer))
    assert torch.equal(inside, alone)
    assert (inside == float("-inf")).nonzero().tolist() == [[0, 7]]  # 5 6 7 again
    words = NGramRepeatBlock(1, use_extension=False)(buffer, torch.zeros(2, 9), bsz=1, beam_size=2, step=5)
    assert (words == float("-inf")).nonzero().tolist() == [[row, word] for row in (0, 1) for word in (5, 6, 7)]
    prefix = torch.full((2, 9), -torch.inf)
    prefix[:, 6] = -1
    assert torch.equal(NGramRepeatBlock(1, use_extension=False)(buffer, prefix, bsz=1, beam_size=2, step=5), prefix)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model after one update that reads 1100 words, and what its training printed."""
    path = tmp_path_factory.mktemp("limits")
    options = ["--arch", "convs2s_tiny", "--optimizer", "adam", "--max-update", 1, *LIMITS, *QUIET]
    options += ["--max-source-positions", 1100, "--max-target-positions", 1100, "--save-dir", path]
    result = run("train", data, "--user-dir", USER_DIR, *options)
    return path / "checkpoint_last.pt", result.stdout + result.stderr


def test_sentences_beyond_a_batch_are_skipped(data: Path, trained: tuple[Path, str]) -> None:
    """In training, validation and translation, where others that are too long are."""
    path, output = trained
    assert "samples have invalid sizes and will be skipped, max_positions=(6, 6)" in output
    lengths = [len(line.split()) for line in (data.parent / "test.src").read_text().splitlines()]
    assert max(lengths) > 5
    result = run("generate", data, "--user-dir", USER_DIR, "--path", path, "--max-len-b", 2, *LIMITS)
    assert result.stdout.count("\nH-") == sum(length <= 5 for length in lengths)
    options = ["--user-dir", USER_DIR, "--path", path, "--task", "translation", *LIMITS]
    result = run("validate", data, *options)
    assert "will be skipped" in result.stdout + result.stderr


def test_sources_are_as_long_as_in_training(data: Path, trained: tuple[Path, str]) -> None:
    options = ["--user-dir", USER_DIR, "--path", trained[0], "--beam", 1, "--max-len-b", 2]
    result = run("interactive", data, *options, stdin="w1 " * 1099 + "\n")
    assert " ".join(["w1"] * 1099) in result.stdout
    assert "are translated" not in result.stderr
    cut = run("interactive", data, *options, "--max-source-positions", 20, stdin="w1 " * 1099 + "\n").stderr
    assert "only the first 19 are translated" in cut


@pytest.mark.parametrize(("options", "count"), [([], 64 + 64), (["--upsample-primary", 2], 2 * 64 + 64)])
def test_several_parts_are_read(data: Path, tmp_path: Path, options: list[object], count: int) -> None:
    shutil.copytree(data, tmp_path / "bin")
    for path in (tmp_path / "bin").glob("train.*"):
        shutil.copy(path, path.with_name(path.name.replace("train", "train1", 1)))
    training = ["--arch", "convs2s_tiny", "--optimizer", "adam", "--batch-size", 8, "--max-epoch", 1, "--no-save"]
    result = run("train", tmp_path / "bin", "--user-dir", USER_DIR, *training, *QUIET, *options, "--disable-validation")
    assert shown(result.stdout + result.stderr, "train")[-1]["train_num_updates"] == str(count // 8)
