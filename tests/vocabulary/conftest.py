"""The models and the batch for tests of losses."""

from tests.sequence_risk.conftest import double, models, sample  # noqa: F401
