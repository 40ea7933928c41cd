"""The model families; importing this registers them and, since a checkpoint may name it, all else that there is."""

from fairseq_plugins import registration  # noqa: F401  (first, for it mends fairseq)
from fairseq_plugins.models import conv_encoder, convs2s, weighted_transformer  # noqa: F401  (registration)
