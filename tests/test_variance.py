"""The effects of ConvS2S's normalisation and initialisation (sections 3.4 and 3.5, appendix A), measured."""

from __future__ import annotations

import csv

import pytest

from tests.commands import ROOT, script

Variances = dict[tuple[str, str], list[tuple[float, float]]]

AS_IT_IS = "as in the paper"
PLAIN = "encoder without residual connections"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Variances:
    """Return variances of activations and gradients for each stack and variant, from the input up, in narrow layers."""
    folder = tmp_path_factory.mktemp("variance")
    result = script(ROOT / "examples" / "variance" / "measure.py", folder, "--width", 64, "--length", 120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (folder / "variance.png").read_bytes().startswith(b"\x89PNG")
    found: Variances = {}
    with (folder / "variance.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            found.setdefault((row["stack"], row["variant"]), []).append(
                (float(row["activations"]), float(row["gradients"]))
            )
    assert all(len(variances) == 21 for variances in found.values())
    return found


def spread(values: list[float]) -> float:
    return max(values) / min(values)


@pytest.mark.parametrize("stack", ["encoder", PLAIN])
def test_variance_is_kept_through_twenty_layers(measured: Variances, stack: str) -> None:
    for values in zip(*measured[stack, AS_IT_IS], strict=True):
        assert spread(list(values)) < 5


def test_the_decoder_keeps_activations_and_shares_gradients_with_the_source(measured: Variances) -> None:
    """The source adds half of the variance of a layer's result, and gets a quarter of the layer's gradient."""
    activations, gradients = zip(*measured["decoder", AS_IT_IS], strict=True)
    assert spread(list(activations)) < 5
    assert 0.75**20 / 2 < gradients[0] / gradients[-1] < 0.1


@pytest.mark.parametrize(
    ("stack", "variant", "lost"),
    [
        ("encoder", "without √½", 1e6),
        ("encoder", "without the factor 4", 1e3),
        ("encoder", "without the factor p", 10),
        ("decoder", "without √½", 1e6),
        (PLAIN, "without the factor 4", 1e10),
        (PLAIN, "without the factor p", 1e3),
    ],
)
def test_variance_is_lost_without_a_factor(measured: Variances, stack: str, variant: str, lost: float) -> None:
    for values in zip(*measured[stack, variant], strict=True):
        assert spread(list(values)) > lost
