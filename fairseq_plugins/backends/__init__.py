"""Packages that make a built model fast on one kind of machine, by other forms of its parts: `cpu`, so far.

Nothing in those of the equations (`nn`, `models`) imports them: `fairseq_plugins.registration` makes it
`TranslationModel.accelerate_`.
"""

from fairseq_plugins import registration  # noqa: F401  (first, for a backend needs the models)
