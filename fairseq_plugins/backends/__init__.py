"""Rooms that make a built model fast on one kind of machine, by other forms of its parts: `cpu`, so far.

Nothing in the rooms of the equations (`nn`, `models`) knows them: each hangs itself in `models.translation_model`.
"""
