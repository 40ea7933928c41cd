"""What fairseq does with the options of a command line or a checkpoint."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from fairseq import utils
from fairseq.data import FastaDataset
from fairseq.dataclass import utils as dataclass_utils
from hydra.core.config_store import ConfigStore
from torch import Tensor

from fairseq_plugins.common.literal import literal
from fairseq_plugins.repairs.contents import reference_in
from fairseq_plugins.repairs.wrapping import in_place_of, raises

FAIRSEQ = ("fairseq", "fairseq_cli")


def refuse(code: object, *_: object) -> NoReturn:
    """Stands in for ``exec``."""
    raise ValueError(f"not run, for the plugin runs nothing that a file or an option contains: {str(code)[:100]!r}")


def read_literals(module: ModuleType) -> None:
    """Make ``eval`` mean `literal` in a module, and ``exec`` nothing, where (the probe) they still are Python's own."""
    names = vars(module)
    for python_s, harmless in ((eval, literal), (exec, refuse)):
        if names.get(python_s.__name__, python_s) is python_s:
            names[python_s.__name__] = harmless


class FairseqFinder(PathFinder):
    """Finds what is imported of fairseq later, and prepares it before it runs."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Another module is left to the finders after this one."""
        if fullname.partition(".")[0] not in FAIRSEQ:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                read_literals(module)
                run(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def read_options_without_eval() -> None:
    """fairseq evaluates options as Python code (``--adam-betas``, ``--model-overrides``), among them those that a
    checkpoint brings along: ``--encoder-layers`` of its models, ``wer_args`` of its criterion ctc.

    In all of its modules, loaded already or later, they are read as literals.
    """
    for module in list(sys.modules.values()):
        # By its package, which a command run with `python -m` has too.
        if isinstance(module, ModuleType) and str(vars(module).get("__package__")).partition(".")[0] in FAIRSEQ:
            read_literals(module)
    sys.meta_path.insert(0, FairseqFinder)


def takes_references(read: Callable[..., Any]) -> bool:
    """Probe: whether an option can refer to another."""
    return not raises(ValueError, read, argparse.Namespace(wandb_project="${common.seed}"))


def refuse_references() -> None:
    """fairseq replaces ``${...}`` in options, and in those that an old checkpoint brings along, by another option or
    what the environment says.

    Its own defaults, of which some are references, are no options.
    """
    read = dataclass_utils.override_module_args
    if not takes_references(read):
        return

    @in_place_of(dataclass_utils, "override_module_args")
    def override_module_args(args: Any) -> Any:
        if found := reference_in(args):
            raise ValueError(found)
        return read(args)


def quote_file_names() -> None:
    """``--dataset-impl fasta`` reads its files with commands of a shell, which runs what a file name says."""
    build = getattr(FastaDataset, "_build_index", None)
    if build is None or "subprocess" not in build.__code__.co_names:  # the probe: it calls no command
        return

    @in_place_of(FastaDataset, "_build_index")
    def build_index(self: Any, path: str) -> Any:
        return build(self, shlex.quote(path))


def configure_parts_without_options() -> None:
    """``--bpe characters`` and ``--bpe bytes`` fail on a command line: hydra finds no
    configuration of a part that has no options.

    It gets one with its name alone.  There is nothing to probe: a part with options has its own.
    """
    migrate = dataclass_utils.migrate_registry

    @in_place_of(dataclass_utils, "migrate_registry")
    def migrate_registry(
        name: str,
        value: Any,
        registry: Any,
        args: Any,
        overrides: list[str],
        deletes: list[str],
        use_name_as_val: bool = False,
    ) -> None:
        if use_name_as_val and value is not None and value not in registry:
            ConfigStore.instance().store(group=name, name=value, node={"_name": value})
        migrate(name, value, registry, args, overrides, deletes, use_name_as_val)


def skips_the_first_embedding(parse: Any) -> bool:
    """Probe: whether ``parse`` skips a line; its code is read, for it takes the name of a file."""
    return "next" in parse.__code__.co_names


def read_first_embedding() -> None:
    """A file of embeddings (``--encoder-embed-path``) without a header, as GloVe's are, loses its first word.

    A header is two whole numbers: how many words there are, and their dimension.
    """
    parse = utils.parse_embedding
    if not skips_the_first_embedding(parse):
        return

    @in_place_of(utils, "parse_embedding")
    def parse_embedding(embed_path: str) -> dict[str, Tensor]:
        with Path(embed_path).open() as file:
            word, *numbers = file.readline().rstrip().split(" ")
        vectors = parse(embed_path)
        if len(numbers) != 1 or not (word + numbers[0]).isdecimal():
            vectors = {word: torch.tensor([float(number) for number in numbers]), **vectors}
        return vectors
