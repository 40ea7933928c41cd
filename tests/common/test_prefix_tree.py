"""Prefixes, and what is computed over them, against rows of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fairseq_plugins.common.prefix_tree import PrefixTree

END, FIRST = 2, 9
ROWS = [[5, 6, END], [7, END], [5, 6, 8, END], [5, END], [END], [5, END]]
SENTENCES = [1, 0, 1, 1, 0, 0]


def tree() -> PrefixTree:
    return PrefixTree(ROWS, SENTENCES, [FIRST, FIRST + 1], torch.device("cpu"))


def prefixes() -> list[tuple[int, ...]]:
    """Of each node, with the sentence in front."""
    made = tree()
    found: list[tuple[int, ...]] = []
    for node in range(made.size):
        row, position = next(
            (row, position) for row, position in (made.nodes == node).nonzero().tolist() if position < len(ROWS[row])
        )
        found.append((SENTENCES[row], *ROWS[row][:position]))
    return found


def test_each_prefix_once() -> None:
    made = tree()
    wanted = {(s, *row[:n]) for row, s in zip(ROWS, SENTENCES, strict=True) for n in range(len(row))}
    assert made.size == len(wanted) == 7
    assert set(prefixes()) == wanted
    for word, position, (sentence, *words) in zip(made.words, made.positions, prefixes(), strict=True):
        assert (int(word), int(position)) == (words[-1] if words else FIRST + sentence, len(words))
    for row, (sentence, tokens) in enumerate(zip(SENTENCES, ROWS, strict=True)):
        path = [prefixes()[node] for node in made.nodes[row, : len(tokens)]]
        assert path == [(sentence, *tokens[:n]) for n in range(len(tokens))]


def test_windows() -> None:
    """As a convolution over each row sees it, and with its gradient."""
    made, width = tree(), 3
    x = torch.randn(made.size, 4, dtype=torch.float64, requires_grad=True)
    windows = made.windows(x, width)
    weight = torch.randn(windows.shape, dtype=torch.float64)
    expected = torch.empty_like(windows)
    for row, tokens in enumerate(ROWS):
        nodes = made.nodes[row, : len(tokens)]
        inputs = F.pad(x[nodes], (0, 0, width - 1, 0))
        for position, node in enumerate(nodes):
            expected[node] = inputs[position : position + width].flatten()
    assert torch.equal(windows, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad((each * weight).sum(), x, retain_graph=True) for each in (windows, expected))
    )


def test_sentences() -> None:
    made = tree()
    x = torch.randn(made.size, 3)
    by_sentence = made.by_sentence(x)
    assert by_sentence.shape == (2, 4, 3)
    assert torch.equal(made.flat(by_sentence), x)
    for node, (sentence, *_) in enumerate(prefixes()):
        assert (by_sentence[sentence] == x[node]).all(dim=1).sum() == 1


def test_each_prefix_sees_its_beginnings() -> None:
    made = tree()
    bias, names = made.bias(torch.float64), prefixes()
    places = made.by_sentence(torch.arange(1.0, made.size + 1).unsqueeze(1)).squeeze(2).long() - 1
    assert bias.shape == (2, 1, 4, 4)
    for sentence in range(2):
        for i, j in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
            here, there = places[sentence, i], places[sentence, j]
            sees = i == j if here < 0 or there < 0 else names[here][: len(names[there])] == names[there]
            assert float(bias[sentence, 0, i, j]) == (0 if sees else -torch.inf)
