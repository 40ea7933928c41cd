"""Commands of ``fairseq-plugins``: each command has a file or folder with its name."""
