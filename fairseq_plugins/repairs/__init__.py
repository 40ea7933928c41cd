"""Repairs of fairseq, torch and numpy; no other package patches them.

A probe tests whether the installed fairseq has a fault; it does not compare versions.  Each repair probes for its
fault, or says why it needs no probe.  No two repairs wrap the same function, so their order matters only where a
comment says so.  `fairseq_plugins.repairs.refusals` is the table of refused options.
"""

from collections.abc import Callable

from fairseq_plugins.repairs import (
    checkpoints,
    command,
    epochs,
    hub,
    resuming,
    safety,
    saving,
    texts,
    training,
    translating,
)

Repair = Callable[[], None]

# No file or option runs code or reads the environment.
SAFETY: tuple[Repair, ...] = (
    checkpoints.load_checkpoints_safely,
    # Follows `load_checkpoints_safely`, which makes ranks refuse configurations that are not plain dictionaries.
    checkpoints.broadcast_plain_configuration,
    checkpoints.validate_contents,  # follows `load_checkpoints_safely`, which names the file in errors
    checkpoints.fit_optimizer_states,
    safety.quote_file_names,
    safety.read_options_without_eval,
    safety.refuse_references,
    safety.unpack_archives_safely,
)

# A resumed training computes the same numbers as an uninterrupted one, and no checkpoint is lost.
RESUMING: tuple[Repair, ...] = (
    epochs.finish_epochs_with_other_update_freq,
    epochs.keep_batches_on_resume,
    epochs.keep_the_last_batch,
    epochs.resume_with_other_processes,
    resuming.begin_training_right,
    resuming.compare_checkpoints,
    saving.copy_checkpoints_whole,
    saving.save_checkpoints_whole,
    saving.save_masters,
)

# Training in several processes, with GPUs or without.
DISTRIBUTED: tuple[Repair, ...] = (
    training.clip_gradients_on_their_device,
    training.flatten_on_gpus_only,
    training.follow_torchrun,
    training.gather_on_cpus,
    training.join_processes_under_hydra,
    training.train_on_cpus,
    training.wrap_models_on_cpus,
)

# These repairs compute the same results as fairseq in less time on a CPU.
SPEED: tuple[Repair, ...] = (
    training.smooth_in_one_pass,
    training.update_in_one_pass,
)

# Commands, texts, search, and the Python interface.
TRANSLATING: tuple[Repair, ...] = (
    texts.decode_pieces_with_their_model,
    texts.end_lines_at_line_feeds,
    texts.name_bad_dictionaries,
    command.name_empty_translations,
    command.parse_command_lines,
    texts.refuse_misaligned_texts,
    texts.segment_long_words,
    texts.translate_every_line,
    hub.generate_as_asked,
    hub.refuse_unread_options,
    hub.use_given_task,
    translating.block_repeated_ngrams,
    translating.build_generators,
    translating.leave_blank_lines_blank,
    translating.load_models,
    translating.replace_unknown_words_by_attention,
    translating.use_no_fused_encoder_layer,
)


def repair_fairseq() -> None:
    """Apply all repairs.  Call this function only once."""
    for repair in (*SAFETY, *RESUMING, *DISTRIBUTED, *SPEED, *TRANSLATING):
        repair()


def set_up_command() -> None:
    """Set up a process that does nothing but run one fairseq command."""
    command.hide_chatter()
    command.keep_freed_memory()
    command.limit_cached_products()
    command.print_option_errors_without_traceback()
