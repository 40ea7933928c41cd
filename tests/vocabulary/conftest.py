"""The models and candidates that the tests of losses and of searches share."""

from tests.search.conftest import everything, some  # noqa: F401
from tests.sequence_risk.conftest import double, models  # noqa: F401
