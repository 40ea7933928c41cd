"""The `fairseq-plugins` command."""
