"""The command ``prepare``, which prepares the data of the papers' experiments."""
