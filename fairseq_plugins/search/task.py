"""The `translation_fast` task."""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Optional

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.common.options import flag, option
from fairseq_plugins.cpu.packing import PRECISIONS, PackedWeightCache
from fairseq_plugins.search.generator import FastBeamSearch, FastBeamSearchWithAlignment
from fairseq_plugins.search.graphs import GraphCache
from fairseq_plugins.search.validation import TextScorer, log_scores
from fairseq_plugins.vocabulary.candidates import Candidates

logger = logging.getLogger(__name__)


@dataclass
class TranslationFastConfig(TranslationConfig):
    candidates: Optional[str] = option(
        None,
        "predict only the candidate words of each batch: folder made by `fairseq-plugins lexicon`, with "
        "candidates.txt and frequent.txt (default: the whole vocabulary)",
    )
    candidates_per_word: int = option(
        20, "with --candidates: number of translations of each source word that are candidates"
    )
    frequent_candidates: int = option(
        1000, "with --candidates: number of the most frequent words that are always candidates"
    )
    cpu_dtype: ChoiceEnum(list(PRECISIONS)) = option(  # type: ignore[valid-type]
        "float32",
        "precision of products with weights when this plugin's models translate on a CPU; float32 if the "
        "CPU does not support it; in int8, all inputs of a product share one step size",
    )
    compile_steps: bool = option(
        False,
        "compile the decoding steps of this plugin's models with torch.compile; on a GPU, also capture the "
        "steps as CUDA graphs; the first batch of each size is slow",
    )
    word_penalty: float = option(
        0.0,
        "number added to the log-probability of each word except the end of the sentence, in nats; above "
        "zero, translations are longer; tune it with `fairseq-plugins tune-length --word-penalties`",
    )
    attention_offset: int = option(
        0,
        "with --replace-unk: distance in words from the most attended source word to the source word that "
        "replaces an unknown word",
    )


@register_task("translation_fast", dataclass=TranslationFastConfig)
class TranslationFastTask(TranslationTask):
    """fairseq's translation task with a faster search, and optionally lower precision and vocabulary selection.

    ``--candidates`` restricts translation to the candidate words of each batch.  ``--candidates`` works with any model,
    also with models that were trained with the whole vocabulary.  In training, the criterion
    `vocab_selection_cross_entropy` uses the candidates.  Checkpoints contain the tables of candidates, so translation
    does not need the folder of ``--candidates``.

    ``--eval-bleu`` logs chrF beside BLEU, see `TextScorer`.  The methods for ``--eval-bleu`` replace those of
    `TranslationTask`, so they call the methods of `FairseqTask` by ``super(TranslationTask, self)``.
    """

    cfg: TranslationFastConfig

    def __init__(self, cfg: TranslationFastConfig, src_dict: Dictionary, tgt_dict: Dictionary) -> None:
        super().__init__(cfg, src_dict, tgt_dict)
        self._warned: set[str] = set()
        if cfg.candidates is None:
            self._warn_unused("without --candidates", "candidates_per_word", "frequent_candidates")
        elif Path(cfg.candidates).exists():
            self.candidates  # noqa: B018  (read now, so that an error is raised before training)

    @functools.cached_property
    def candidates(self) -> Candidates | None:
        """The tables of ``--candidates``, or None without the option."""
        cfg = self.cfg
        if cfg.candidates is None:
            return None
        return Candidates.read(
            cfg.candidates, self.src_dict, self.tgt_dict, cfg.candidates_per_word, cfg.frequent_candidates
        )

    # All generators of the task share one cache, because fairseq's Python interface builds a generator for each call.
    @functools.cached_property
    def weight_cache(self) -> PackedWeightCache:
        return PackedWeightCache(str(self.cfg.cpu_dtype))

    @functools.cached_property
    def _graphs(self) -> GraphCache | None:
        return GraphCache() if self.cfg.compile_steps else None

    @functools.cached_property
    def _scorer(self) -> TextScorer:
        return TextScorer(self.cfg, self.tgt_dict)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build a model.

        In training, also read the options of ``--eval-bleu``, so that an error is raised at once.  Translation does not
        read these options, because the files that they name may have been moved.
        """
        if self.cfg.eval_bleu and not from_checkpoint:
            self._scorer  # noqa: B018
        return super(TranslationTask, self).build_model(cfg, from_checkpoint)

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return the loss, the sample size and the logs of a batch, with n-gram counts if ``--eval-bleu`` is set."""
        loss, sample_size, log = super(TranslationTask, self).valid_step(sample, model, criterion)
        if self.cfg.eval_bleu:
            while hasattr(model, "module"):  # remove wrappers for distributed training
                model = model.module
            found = self.inference_step(self.build_generator([model], self._scorer.search), [model], sample)
            log.update(self._scorer.count([hypotheses[0]["tokens"] for hypotheses in found], sample["target"]))
        return loss, sample_size, log

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log the averages of the criterion, and the scores of translations, even if all translations are blank."""
        super(TranslationTask, self).reduce_metrics(logging_outputs, criterion)
        log_scores(logging_outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the part of a checkpoint that the task writes, including the tables of candidates."""
        state = dict(super().state_dict())
        if (candidates := vars(self).get("candidates")) is not None:
            tables = {"translations": candidates.translations.cpu(), "always": candidates.always.cpu()}
            state["candidates"] = {"options": self._options(), **tables}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the tables of candidates from a checkpoint.

        The checkpoint's tables are ignored if the task has already read the folder of ``--candidates``, or if the task
        and the checkpoint have different options for candidates.
        """
        others = dict(state_dict)
        saved = others.pop("candidates", None)
        super().load_state_dict(others)
        if not isinstance(saved, dict | NoneType):
            raise ValueError(
                f"--candidates: the checkpoint's task_state holds a {type(saved).__name__} instead of a dict: "
                "use another checkpoint"
            )
        if saved and "candidates" not in vars(self) and str(saved.get("options")) == str(self._options()):
            self.candidates = Candidates.restore(
                saved.get("translations"), saved.get("always"), self.src_dict, self.tgt_dict
            )

    def _options(self) -> list[Any]:
        return [self.cfg.candidates, self.cfg.candidates_per_word, self.cfg.frequent_candidates]

    def _warn_unused(self, circumstance: str, *options: str) -> None:
        """Warn once about each option that is set but has no effect; fairseq may build many generators."""
        for name in options:
            if getattr(self.cfg, name) != getattr(TranslationFastConfig, name) and name not in self._warned:
                self._warned.add(name)
                logger.warning(f"{flag(name)} does nothing {circumstance}")

    def build_generator(
        self,
        models: list[BaseFairseqModel],
        args: Any,
        seq_gen_cls: type | None = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Build a generator with the faster search and with the task's candidates, if any.

        If the caller passes a generator class, this class is used without changes.  With ``--score-reference``, fairseq
        builds its own scorer, which uses the whole vocabulary.
        """
        if getattr(args, "replace_unk", None) is None:
            self._warn_unused("without --replace-unk", "attention_offset")
        if getattr(args, "score_reference", False):
            self._warn_unused("with --score-reference", "candidates", "cpu_dtype", "compile_steps", "word_penalty")
        extra = dict(extra_gen_cls_kwargs or {})
        if seq_gen_cls is None:
            # fairseq reads print_alignment only if no generator class is given.
            aligns = bool(getattr(args, "print_alignment", None))
            if aligns:
                extra["print_alignment"] = args.print_alignment
            extra |= {"weight_cache": self.weight_cache, "graphs": self._graphs}
            extra |= {"word_penalty": self.cfg.word_penalty, "candidates": self.candidates}
            seq_gen_cls = FastBeamSearchWithAlignment if aligns else FastBeamSearch
        return super().build_generator(models, args, seq_gen_cls, extra, **kwargs)
