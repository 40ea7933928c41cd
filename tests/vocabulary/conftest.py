"""The models and the batch of the tests of losses."""

from tests.sequence_risk.conftest import double, models, sample  # noqa: F401
