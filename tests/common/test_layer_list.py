"""Layer lists: fairseq's syntax is accepted, and no code runs."""

import pytest

from fairseq_plugins.common.options import input_widths, parse_attention, parse_convolutions


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "512",
        "[512, 3]",
        "[(512, 3, 1, 1)]",
        "[(0, 3)]",
        "[(512, True)]",
        "[('512', 3)]",
        "[(512, 3)] * 1000000000000",
        "[] * 1000000000000000000000000000000",
        "[(512, 3)] * 600 + [(512, 3)] * 600",
        "[(512, 3)",
        "[(512, 3) for _ in range(2)]",
        "__import__('os').system('true')",
        "[(len('ab'), 3)]",
        "[(2**30**30, 3)]",
        "(" * 5000,
    ],
)
def test_refuses_other_text_and_names_the_option(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--encoder-layers: "):
        parse_convolutions(text, "--encoder-layers")


def test_refuses_more_than_200_layers() -> None:
    assert len(parse_convolutions("[(512, 3)] * 200", "--encoder-layers")) == 200
    with pytest.raises(ValueError, match=r"^--encoder-layers: 201 "):
        parse_convolutions("[(512, 3)] * 201", "--encoder-layers")


def test_refuses_a_residual_from_before_the_input() -> None:
    parse_convolutions("[(8, 3), (8, 3, 2)]", "--encoder-layers")
    with pytest.raises(ValueError, match=r"^--encoder-layers: .* layer 2 "):
        parse_convolutions("[(8, 3), (8, 3, 3)]", "--encoder-layers")


def test_input_widths_of_layers_and_residual_connections() -> None:
    layers = parse_convolutions("[(8, 3), (16, 3, 2), (24, 3, 0), (32, 3, 3)]", "--encoder-layers")
    assert input_widths(layers) == [(8, 8), (8, 8), (16, 16), (24, 8)]
    assert input_widths([]) == []


def test_attention_in_any_subset_of_the_layers() -> None:
    assert parse_attention("True", 3) == [True] * 3
    assert parse_attention("[True, False] + [False]", 3) == [True, False, False]


@pytest.mark.parametrize("text", ["False", "[False] * 3", "[True]", "[1, 0, 1]", "yes", "[True, None, True]"])
def test_refuses_attention_that_does_not_fit(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--decoder-attention: "):
        parse_attention(text, 3)
