"""A model translates without the files that were needed only for its training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugins.cli import main as cli
from fairseq_plugins.convs2s.model import ConvS2SModel
from tests.commands import train


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, and with the pretrained embeddings and candidates of its training."""
    folder = tmp_path_factory.mktemp("alone")
    lexicon = folder / "lexicon"
    lexicon.mkdir()
    words = [f"w{number}" for number in range(20)]
    vectors = [f"{word} " + " ".join(f"{number / 16:.3f}" for number in torch.randn(16)) for word in words]
    (folder / "words.txt").write_text("\n".join(["20 16", *vectors, ""]))
    (lexicon / "candidates.txt").write_text("".join(f"{word} {word} 1\n" for word in words[::2]))
    (lexicon / "frequent.txt").write_text("".join(f"{word} 9\n" for word in words))
    options = ["--encoder-embed-path", folder / "words.txt", "--decoder-embed-path", folder / "words.txt"]
    options += ["--task", "translation_fast", "--candidates", lexicon, "--frequent-candidates", 8]
    train(data, folder, *options, "--criterion", "vocab_selection_cross_entropy", "--max-epoch", 1)
    return folder


@pytest.fixture(scope="module")
def alone(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkpoint without the files of its training."""
    folder = tmp_path_factory.mktemp("kept")
    checkpoint = shutil.copy(trained / "checkpoint_last.pt", folder)
    for name in ("words.txt", "lexicon"):
        (trained / name).rename(folder / name)
    return Path(checkpoint)


def from_python(data: Path, checkpoint: Path, **options: object) -> list[str]:
    hub = ConvS2SModel.from_pretrained(str(checkpoint.parent), checkpoint.name, str(data), **options)
    return [hub.translate(line, beam=3) for line in (data.parent / "test.src").read_text().splitlines()]


def test_from_pretrained_translates_as_before(data: Path, trained: Path, request: pytest.FixtureRequest) -> None:
    """The checkpoint's candidates are used, unless others are given."""
    path = trained / "checkpoint_last.pt"
    before, free = from_python(data, path), from_python(data, path, candidates=None)
    checkpoint = request.getfixturevalue("alone")
    assert from_python(data, checkpoint) == before != free
    assert from_python(data, checkpoint, candidates=None) == free
    other = {"candidates": str(checkpoint.parent / "lexicon")}
    assert from_python(data, checkpoint, **other) == before
    assert from_python(data, checkpoint, **other, frequent_candidates=20) != before
    with pytest.raises(ValueError, match=r"frequent\.txt"):
        from_python(data, checkpoint, frequent_candidates=20)


def test_words_in_another_order_are_refused(data: Path, alone: Path, tmp_path: Path) -> None:
    """Other dictionaries of the same size are refused, also for the second model of an ensemble."""
    shuffled = shutil.copytree(data, tmp_path / "shuffled")
    dictionary = shuffled / "dict.tgt.txt"
    dictionary.write_text("".join(reversed(dictionary.read_text().splitlines(keepends=True))))
    state = torch.load(alone)
    del state["extra_state"]["words"]
    torch.save(state, tmp_path / "older.pt")
    error = f"{alone}: .*target dictionary"
    with pytest.raises(ValueError, match=error):
        checkpoint_utils.load_model_ensemble([str(tmp_path / "older.pt"), str(alone)], {"data": str(shuffled)})
    with pytest.raises(ValueError, match=error):
        from_python(shuffled, alone)
    for number in range(2):
        shutil.copy(alone, tmp_path / f"parts-shard{number}.pt")
    parts = [str(tmp_path / "parts.pt")]
    with pytest.raises(ValueError, match=r"parts\.pt: .*target dictionary"):
        checkpoint_utils.load_model_ensemble(parts, {"data": str(shuffled)}, strict=False, num_shards=2)
    with pytest.raises(SystemExit, match=error):
        cli.main(["export", str(alone), str(tmp_path / "exported"), "--data", str(shuffled)])


def test_embeddings_are_those_of_the_checkpoint(data: Path, alone: Path) -> None:
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(alone)], arg_overrides={"data": str(data)})
    state = checkpoint_utils.load_checkpoint_to_cpu(str(alone))["model"]
    assert torch.equal(model.encoder.embedding.words.weight, state["encoder.embedding.words.weight"])
