"""``fairseq-plugins import-fconv``: a convs2s checkpoint from one of fairseq's fconv."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from omegaconf import OmegaConf, open_dict

import fairseq_plugins
from fairseq_plugins.cli.any_file import blaming
from fairseq_plugins.cli.arguments import add_user_dir, import_user_dir, refuse_existing
from fairseq_plugins.convs2s.fconv import convert_options, convert_parameters
from fairseq_plugins.repairs.records import architecture


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN.pt", help="checkpoint of a fairseq fconv model, of any age")
    parser.add_argument("output", type=Path, metavar="OUT.pt", help="where to write the convs2s checkpoint")
    add_user_dir(parser)


def run(args: Namespace) -> None:
    """Convert one checkpoint.

    Raises:
        ValueError: the input is missing or no fconv checkpoint, or the output exists already or cannot be written.
        OSError: a file cannot be read or written.
        UnpicklingError: the input is no checkpoint, or holds more than data.
    """
    fairseq_plugins.install()
    if not args.input.is_file():
        raise ValueError(f"there is no file {args.input}")
    refuse_existing(args.output)
    import_user_dir(args.user_dir)
    with blaming(args.input, "cannot be converted from fairseq's fconv"):
        converted = convert(checkpoint_utils.load_checkpoint_to_cpu(str(args.input)))
    checkpoint_utils.torch_persistent_save(converted, str(args.output))
    path = shlex.quote(str(args.output))
    print(f'{args.output}: translate with fairseq-generate --user-dir "$(fairseq-plugins user-dir)" --path {path}')


def convert(state: dict[str, Any]) -> dict[str, Any]:
    """The convs2s checkpoint that an fconv checkpoint becomes.

    Raises:
        ValueError: it holds another model, or parameters that are none of fconv's.
    """
    cfg = state["cfg"]
    options = cfg.model
    name = architecture(options)
    family = ARCH_MODEL_NAME_REGISTRY.get(name, "unknown")
    if family != "fconv":
        raise ValueError(
            f"the checkpoint holds {name!r}, of the family {family}, and not one of fairseq's fconv; an "
            "architecture of your own wants --user-dir"
        )
    ARCH_CONFIG_REGISTRY[name](options)  # old checkpoints leave out what was the architecture's default
    with open_dict(cfg):
        cfg.model = convert_options(options, state["model"])
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, enum_to_str=True),
        "model": convert_parameters(state["model"]),
        "criterion": None,
        "optimizer_history": state["optimizer_history"],
        "task_state": state.get("task_state", {}),
        "extra_state": state["extra_state"],
        # The optimizer's state is left behind: it lists parameters in fconv's order.
        "last_optimizer_state": None,
    }
