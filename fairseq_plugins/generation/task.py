"""Translation among the candidates of each batch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

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
    """

    cfg: TranslationFastConfig

    @cached_property
    def candidates(self) -> Candidates | None:
        """What ``--candidates`` holds, read when first asked for; None without it.

        Raises:
            ValueError: the folder is not as `Candidates.read` wants it.
        """
        if self.cfg.candidates is None:
            return None
        return Candidates.read(
            self.cfg.candidates,
            self.source_dictionary,
            self.target_dictionary,
            per_word=self.cfg.candidates_per_word,
            frequent=self.cfg.frequent_candidates,
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
