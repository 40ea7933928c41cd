"""Rooms that make a built model fast on one kind of machine, by other forms of its parts: `cpu`, so far.

Nothing in the rooms of the equations (`nn`, `models`) knows them: `fairseq_plugins.registration` hangs them in
`models.translation_model`.
"""

from fairseq_plugins import registration  # noqa: F401  (first, for a room needs the models)
