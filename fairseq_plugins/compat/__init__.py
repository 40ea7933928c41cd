"""The one place that touches fairseq, torch and numpy themselves.

Every patch has a probe, or says why none: it asks for what it mends, never for a version, and leaves alone what is
already right.
`fairseq_plugins.registration` imports this package, so ``--user-dir`` is enough to get all of them.  No function of
fairseq is wrapped twice, so that their order is no matter but where a comment says so.
"""

from collections.abc import Callable

from fairseq_plugins.compat import (
    archives,
    batches,
    checkpoints,
    command_line,
    contents,
    distributed,
    hub,
    interactive,
    options,
    processors,
    records,
    resuming,
    saving,
    searches,
    translation,
)

Repair = Callable[[], None]

# What this project promises: no file and no option is run, or refers to what is none of its business.
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

# What is kind to users of fairseq, whose models these may be or others.
KINDNESS: tuple[Repair, ...] = (
    batches.keep_the_batches_on_resume,
    batches.restore_numpy_compat,
    batches.find_buckets_with_numpy_2,
    batches.keep_the_last_batch,
    batches.read_several_parts,
    command_line.understand_command_lines,
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
    options.read_numbers_of_manual_schedules,  # behind read_options_without_eval, by which it reads the numbers
    processors.clip_gradients_where_they_are,
    processors.flatten_on_gpus_only,
    processors.overflow_on_processors,
    records.ask_what_was_trained,
    resuming.begin_where_training_stopped,
    saving.save_checkpoints_whole,
    saving.copy_checkpoints_whole,
    searches.count_groups_by_their_place_in_the_batch,
    searches.refuse_without_constraints,
    translation.load_models,
    translation.use_no_fused_encoder_layer,
    translation.block_repeated_ngrams,
    translation.build_generators,
    translation.replace_unknown_words_by_attention,
)


for repair in (*SAFETY, *KINDNESS):
    repair()
