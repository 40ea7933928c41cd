"""Weight normalisation, embeddings of words and positions, and the softmax of attention in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.common.embedding import InputEmbedding, pretrained_embedding
from fairseq_plugins.common.source import softmax
from fairseq_plugins.common.weight_norm import (
    fold_weight_norm_,
    has_weight_norm,
    normalised_linear,
    remove_weight_norm_,
    without_weight_norm,
)
from fairseq_plugins.convs2s.layers import GatedConvolution


def network() -> nn.ModuleList:
    torch.manual_seed(1)
    modules = nn.ModuleList(
        [normalised_linear(5, 4), normalised_linear(5, 1), GatedConvolution(3, 2, kernel=4, causal=True)]
    )
    for module in modules:
        module.parametrizations.weight.original0.data.uniform_(0.5, 2)
    return modules


def test_a_copy_without_weight_norm_is_independent_of_the_original() -> None:
    original = network()
    weights = [module.weight.detach().clone() for module in original]
    shared = object()
    original.shared = shared
    original.register_buffer("table", torch.ones(3))
    twin = without_weight_norm(original, shared)
    assert twin.table is original.table  # other tensors, which may be large, are shared
    assert twin[0].bias is original[0].bias
    assert not has_weight_norm(twin)
    assert has_weight_norm(original)
    assert twin.shared is shared
    for module in original:
        module.parametrizations.weight.original1.data.add_(1)
    for weight, mine, theirs in zip(weights, original, twin, strict=True):
        assert torch.equal(theirs.weight, weight)
        assert not torch.allclose(mine.weight, weight)
        assert theirs.bias is mine.bias


def test_a_training_checkpoint_folds_to_the_same_weights() -> None:
    original, prepared = network(), network()
    remove_weight_norm_(prepared)
    for module in original:
        module.parametrizations.weight.original1.data.normal_()
    state = dict(original.state_dict())
    fold_weight_norm_(state, prepared)
    prepared.load_state_dict(state)
    for mine, theirs in zip(original, prepared, strict=True):
        torch.testing.assert_close(theirs.weight, mine.weight)


PAD = 1


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_is_no_part_of_a_sentence(positions: str, left: bool) -> None:
    """Padding may reach beyond the model's positions, as in a batch of a bucket's length, but a sentence may not."""
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
    """The file may have other words and lack some; the error for an unusable file names the option."""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """The result is the nearest number of that precision, which a softmax computed in half precision misses."""
    torch.manual_seed(1)
    scores = (4 * torch.randn(50, 400)).to(dtype)
    exact = torch.softmax(scores.double(), dim=-1)
    # Half a unit in the last place is allowed; all units are equal below the smallest normal number.
    info = torch.finfo(dtype)
    allowed = 0.5 * info.eps * exact.clamp(min=info.tiny) * 1.001
    assert (softmax(scores).double() - exact).abs().le(allowed).all()
    powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    in_half = powers / powers.sum(dim=-1, keepdim=True)
    assert not (in_half.double() - exact).abs().le(allowed).all()
