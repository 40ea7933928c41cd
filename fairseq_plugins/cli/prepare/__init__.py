"""The command ``prepare``: data of the papers' experiments."""
