"""Embeddings of words and positions: how long a sentence is, whatever it is padded with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.common.embedding import InputEmbedding, pretrained_embedding

PAD = 1


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_is_no_part_of_a_sentence(positions: str, left: bool) -> None:
    """A batch may be padded beyond the model's positions, as to a bucket's length; a sentence may not reach there."""
    torch.manual_seed(1)
    words = nn.Embedding(9, 6, padding_idx=PAD)
    embedding = InputEmbedding(words, max_positions=4, positions=positions, dropout=0.0)

    def pad(sentence: list[int]) -> Tensor:
        padding = [PAD] * (7 - len(sentence))
        return torch.tensor([padding + sentence if left else sentence + padding])

    sentence = [5, 3, 8, 2]
    padded = embedding(torch.cat([pad(sentence), pad(sentence[:2])]))
    of_words = slice(3, None) if left else slice(4)
    assert torch.equal(padded[:1, of_words], embedding(torch.tensor([sentence])))
    with pytest.raises(ValueError, match=r"5 tokens .* 4 positions"):
        embedding(torch.cat([pad(sentence), pad([5, 3, 8, 4, 2])]))


def test_pretrained_words_are_those_of_the_file(tmp_path: Path) -> None:
    """Also where it has others, and not all; the option is named where it cannot be used."""
    path, dictionary = tmp_path / "words.txt", Dictionary()
    for word in ("dog", "cat"):
        dictionary.add_symbol(word)
    path.write_text("2 3\ncat 1 2 3\nhorse 4 5 6\n")
    weight = pretrained_embedding(dictionary, 3, str(path), "--option").weight
    assert weight[dictionary.index("cat")].tolist() == [1, 2, 3]
    assert weight.shape == (len(dictionary), 3)
    assert weight[dictionary.index("dog")].ne(0).all()
    for file, content in ((path, "1 3\ncat 1 2\n"), (path, ""), (tmp_path / "nowhere.txt", None)):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ValueError, match=f"^--option {file}: "):
            pretrained_embedding(dictionary, 3, str(file), "--option")
