"""The `translation_fast` task."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import NoneType
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationTask

from fairseq_plugins.common.options import flag
from fairseq_plugins.cpu.packing import Packing
from fairseq_plugins.search.config import TranslationFastConfig
from fairseq_plugins.search.generator import FastBeamSearch, FastBeamSearchWithAlignment
from fairseq_plugins.search.graphs import GraphCache
from fairseq_plugins.vocabulary.candidates import Candidates

logger = logging.getLogger(__name__)


@register_task("translation_fast", dataclass=TranslationFastConfig)
class TranslationFastTask(TranslationTask):
    """fairseq's translation task with a faster search, and with products of fewer bits and among fewer words if wanted.

    With ``--candidates`` it translates with the words that a batch may need.  Training uses them with the criterion
    `vocab_selection_cross_entropy`; translating does with any model, also with one that was trained on the whole
    vocabulary.  Checkpoints hold the candidates, for translating where the folder is gone.

    Raises:
        ValueError: the folder of ``--candidates`` is not as `Candidates.read` wants it.
    """

    cfg: TranslationFastConfig

    def __init__(self, cfg: TranslationFastConfig, src_dict: Dictionary, tgt_dict: Dictionary) -> None:
        super().__init__(cfg, src_dict, tgt_dict)
        self._told: set[str] = set()
        if cfg.candidates is None:
            self._tell_of("without --candidates", "candidates_per_word", "frequent_candidates")
        elif Path(cfg.candidates).exists():
            self.candidates  # noqa: B018  (reads them: of an error the user hears at the start)

    @functools.cached_property
    def candidates(self) -> Candidates | None:
        """Those of ``--candidates``; None without.

        Raises:
            ValueError: neither their folder nor the checkpoint has them.
        """
        cfg = self.cfg
        if cfg.candidates is None:
            return None
        return Candidates.read(
            cfg.candidates, self.src_dict, self.tgt_dict, cfg.candidates_per_word, cfg.frequent_candidates
        )

    # One for all generators of the task: fairseq's Python interface makes a new one for each call.
    @functools.cached_property
    def packing(self) -> Packing:
        return Packing(str(self.cfg.cpu_dtype))

    @functools.cached_property
    def _programs(self) -> GraphCache | None:
        return GraphCache() if self.cfg.compile_steps else None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the task."""
        state = dict(super().state_dict())
        if (candidates := vars(self).get("candidates")) is not None:
            tables = {"translations": candidates.translations.cpu(), "always": candidates.always.cpu()}
            state["candidates"] = {"options": self._options(), **tables}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take candidates that were chosen with the same options from a checkpoint, if there is no folder to read.

        Raises:
            ValueError: the checkpoint's candidates are not tables of the task's dictionaries.
        """
        others = dict(state_dict)
        kept = others.pop("candidates", None)
        super().load_state_dict(others)
        if not isinstance(kept, dict | NoneType):
            raise ValueError(f"--candidates of the checkpoint: its task_state holds a {type(kept).__name__} for them")
        if kept and "candidates" not in vars(self) and str(kept.get("options")) == str(self._options()):
            self.candidates = Candidates.restore(
                kept.get("translations"), kept.get("always"), self.src_dict, self.tgt_dict
            )

    def _options(self) -> list[Any]:
        return [self.cfg.candidates, self.cfg.candidates_per_word, self.cfg.frequent_candidates]

    def _tell_of(self, where: str, *options: str) -> None:
        """Of options that somebody has given and that do nothing there; once, for Python asks for many generators."""
        for option in options:
            name = flag(option)
            if getattr(self.cfg, option) != getattr(TranslationFastConfig, option) and name not in self._told:
                self._told.add(name)
                logger.warning(f"{name} does nothing {where}")

    def build_generator(
        self,
        models: list[BaseFairseqModel],
        args: Any,
        seq_gen_cls: type | None = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As fairseq's with the faster search, among candidates where there are any.

        A caller's own generator is taken as it is, and fairseq scores references with the whole vocabulary.

        Raises:
            ValueError: two options do not go together.
        """
        if getattr(args, "replace_unk", None) is None:
            self._tell_of("without --replace-unk", "attention_offset")
        if getattr(args, "score_reference", False):
            self._tell_of("with --score-reference", "candidates", "cpu_dtype", "compile_steps", "word_penalty")
        extra = dict(extra_gen_cls_kwargs or {})
        if seq_gen_cls is None:
            aligns = bool(getattr(args, "print_alignment", None))  # fairseq looks only where no class is given
            if aligns:
                extra["print_alignment"] = args.print_alignment
            extra |= {"packing": self.packing, "programs": self._programs}
            extra |= {"word_penalty": self.cfg.word_penalty, "candidates": self.candidates}
            seq_gen_cls = FastBeamSearchWithAlignment if aligns else FastBeamSearch
        return super().build_generator(models, args, seq_gen_cls, extra, **kwargs)
