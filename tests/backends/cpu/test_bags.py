"""Attention at a decoding step, against a row at a time written down."""

from __future__ import annotations

import pytest
import torch

from fairseq_plugins.backends.cpu.bags import SightByBags, bags
from fairseq_plugins.nn.attention import Sight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bags", [False, True])
def test_rows_average_what_they_look_at(has_bags: bool, dtype: torch.dtype) -> None:
    """Each row at four of the first nine keys of its sentence, of which there is memory for eleven."""
    torch.manual_seed(1)
    sentences, heads, rows, width, seen = 3, 2, 5, 4, 9
    q, keys, values = (torch.randn(sentences, heads, size, width).to(dtype) for size in (rows, 11, 11))
    places = torch.rand(sentences, rows, seen).argsort(dim=-1)[..., :4]
    if has_bags:
        sight = SightByBags(seen, None, *bags(places, heads, size=11), places.unsqueeze(1))
    else:
        mask = torch.full((sentences, rows, seen), -torch.inf, dtype=dtype).scatter(2, places, 0)
        sight = Sight(seen, bias=mask.unsqueeze(1))

    averages = sight.average(2 * sight.weights(q, keys.transpose(2, 3)), values)

    assert averages.dtype == dtype
    exact, tolerance = averages.double(), 8 * torch.finfo(dtype).eps
    for sentence, row in torch.cartesian_prod(torch.arange(sentences), torch.arange(rows)):
        own = places[sentence, row]
        for head in range(heads):
            at = sentence, head, own
            weights = (keys[at].double() @ q[sentence, head, row].double() / width**0.5).softmax(dim=0)
            expected = 2 * weights @ values[at].double()
            torch.testing.assert_close(exact[sentence, head, row], expected, rtol=tolerance, atol=4 * tolerance)


def test_what_others_look_at_does_not_matter() -> None:
    """A hypothesis whose numbers are none leaves the others of its sentence alone."""
    q, places = torch.ones(1, 1, 2, 3), torch.tensor([[[0, 2], [1, 3]]])
    values = torch.ones(1, 1, 4, 3)
    values[:, :, 1] = torch.nan
    sight = SightByBags(4, None, *bags(places, heads=1, size=4), places.unsqueeze(1))
    averages = sight.average(sight.weights(q, torch.ones(1, 1, 3, 4)), values)
    assert averages[0, 0, 0].tolist() == [1, 1, 1]
    assert averages[0, 0, 1].isnan().all()


def test_nothing_to_look_at() -> None:
    """A source without words, as matrix products have it."""
    sight = SightByBags(0, None, *bags(torch.empty(2, 5, 0, dtype=torch.long), heads=3, size=0))
    q, keys, values = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 4, 0), torch.ones(2, 3, 0, 4)
    for each in (sight, Sight(0, None)):
        assert torch.equal(each.average(each.weights(q, keys), values), torch.zeros_like(q))
