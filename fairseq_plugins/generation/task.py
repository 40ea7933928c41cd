"""Translation among the candidates of each batch."""

from __future__ import annotations

from typing import Any

from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationTask

from fairseq_plugins.generation.candidates import Candidates
from fairseq_plugins.generation.config import TranslationFastConfig
from fairseq_plugins.generation.search import CandidateSearch, CandidateSearchWithAlignment

__all__ = ["TranslationFastTask"]


@register_task("translation_fast", dataclass=TranslationFastConfig)
class TranslationFastTask(TranslationTask):
    """fairseq's translation task, which with ``--candidates`` translates with the words that a batch may need.

    Training uses them with the criterion `vocab_selection_cross_entropy`; translating does with any model, also with
    one that was trained on the whole vocabulary.

    Raises:
        ValueError: the folder of ``--candidates`` is not as `Candidates.read` wants it.
    """

    cfg: TranslationFastConfig

    def __init__(self, cfg: TranslationFastConfig, src_dict: Dictionary, tgt_dict: Dictionary) -> None:
        super().__init__(cfg, src_dict, tgt_dict)
        self.candidates: Candidates | None = None
        if cfg.candidates is not None:
            self.candidates = Candidates.read(
                cfg.candidates,
                src_dict,
                tgt_dict,
                per_word=cfg.candidates_per_word,
                frequent=cfg.frequent_candidates,
            )

    def build_generator(
        self,
        models: list[BaseFairseqModel],
        args: Any,
        seq_gen_cls: type | None = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As fairseq's, with the search among candidates where there are any.

        A caller's own generator is taken as it is, and fairseq scores references with the whole vocabulary.
        """
        extra = dict(extra_gen_cls_kwargs or {})
        if seq_gen_cls is None and self.candidates is not None:
            extra["candidates"] = self.candidates
            seq_gen_cls = CandidateSearch
            if getattr(args, "print_alignment", None):
                # fairseq chooses this only where no class is given.
                seq_gen_cls = CandidateSearchWithAlignment
                extra["print_alignment"] = args.print_alignment
        return super().build_generator(models, args, seq_gen_cls, extra, **kwargs)
