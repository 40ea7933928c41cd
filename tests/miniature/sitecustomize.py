"""Shorten fairseq's commands: Python runs this file at its start if the folder is on PYTHONPATH."""

import sys

SHORT = {
    "train": ["--max-update", "3", "--num-workers", "0"],
    "hydra-train": ["optimization.max_update=3", "dataset.num_workers=0"],
    "generate": ["--max-len-a", "0", "--max-len-b", "6"],
    "interactive": ["--max-len-a", "0", "--max-len-b", "6"],
}

for _word in sys.orig_argv[:4]:
    for _command, _options in SHORT.items():
        if _word == f"fairseq_cli.{_command}" or _word.endswith(f"/fairseq-{_command}"):
            sys.argv += _options
