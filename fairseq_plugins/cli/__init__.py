"""``fairseq-plugins``: one file or folder for each command, named after it."""
