"""The only room that patches fairseq, torch and numpy.

Each patch has a probe, or says why it has none: it asks for the fault that it repairs, never for a version.  No
function of fairseq is wrapped twice, so the order matters only where a comment says so.
"""

from collections.abc import Callable

from fairseq_plugins.repairs import (
    archives,
    batches,
    checkpoints,
    command_line,
    contents,
    dictionaries,
    distributed,
    hub,
    interactive,
    mid_epoch,
    options,
    pieces,
    precision,
    processors,
    records,
    resuming,
    saving,
    searches,
    texts,
    translation,
)
from fairseq_plugins.repairs.chatter import hide_chatter
from fairseq_plugins.repairs.errors import print_errors_of_options_alone
from fairseq_plugins.repairs.memory import keep_memory

Repair = Callable[[], None]

# No file or option may run code, or read the environment.
SAFETY: tuple[Repair, ...] = (
    archives.unpack_archives_beside_them,
    checkpoints.load_checkpoints_safely,
    checkpoints.broadcast_plain_configuration,  # behind the former, which refuses the other form
    contents.look_at_what_is_read,  # behind checkpoints.load_checkpoints_safely, which says of which file it is refused
    contents.fit_optimizer_states,
    options.read_options_without_eval,
    options.refuse_references,
    options.quote_file_names,
)

# Bug fixes for fairseq.
FIXES: tuple[Repair, ...] = (
    batches.keep_the_batches_on_resume,
    batches.restore_numpy_compat,
    batches.find_buckets_with_numpy_2,
    batches.keep_the_last_batch,
    batches.read_several_parts,
    command_line.understand_command_lines,
    dictionaries.name_bad_lines_of_dictionaries,
    distributed.follow_torchrun,
    distributed.gather_on_processors,
    distributed.join_the_others_under_hydra,
    distributed.train_on_processors,
    distributed.validate_what_there_is,
    distributed.wrap_models_on_processors,
    hub.copy_the_state_of_tasks,
    hub.generate_as_asked,
    hub.take_the_task_asked_for,
    hub.refuse_options_of_other_tasks,
    interactive.print_every_letter,
    interactive.segment_long_words,
    interactive.translate_every_line,
    options.configure_parts_without_options,
    options.read_first_embedding,
    mid_epoch.finish_epochs_with_another_update_freq,
    mid_epoch.resume_with_another_number_of_processes,
    pieces.decode_pieces_with_their_model,
    precision.save_masters,
    processors.clip_gradients_where_they_are,
    processors.flatten_on_gpus_only,
    records.ask_what_was_trained,
    resuming.begin_where_training_stopped,
    saving.save_checkpoints_whole,
    saving.copy_checkpoints_whole,
    searches.align_the_hypotheses_that_there_are,
    searches.count_groups_by_their_place_in_the_batch,
    searches.refuse_without_constraints,
    texts.end_lines_at_line_feeds,
    texts.name_data_of_no_use,
    texts.refuse_texts_that_do_not_match,
    texts.say_that_nothing_was_translated,
    translation.load_models,
    translation.use_no_fused_encoder_layer,
    translation.block_repeated_ngrams,
    translation.build_generators,
    translation.leave_blank_lines_blank,
    translation.replace_unknown_words_by_attention,
)


def repair_fairseq() -> None:
    """Apply all repairs; to be called once."""
    for repair in (*SAFETY, *FIXES):
        repair()


def set_up_command() -> None:
    """Set up a process of one of fairseq's commands, which does nothing else than to train or translate."""
    keep_memory()
    print_errors_of_options_alone()
    hide_chatter()
