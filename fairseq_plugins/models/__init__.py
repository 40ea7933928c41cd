"""The model families; importing this registers them, in a fairseq that is mended."""

from fairseq_plugins import compat  # noqa: F401  (first: nothing registers without the repairs)
from fairseq_plugins.models import conv_encoder, convs2s, weighted_transformer  # noqa: F401  (registration)
