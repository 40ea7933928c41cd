"""The one place that touches fairseq, torch and numpy themselves.

Every patch has a probe: it asks for what it mends, never for a version, and leaves alone what is already right.
`fairseq_plugins.registration` imports this package, so ``--user-dir`` is enough to get all of them.
"""

import functools

from fairseq_plugins.compat import (
    checkpoints,
    contents,
    distributed,
    half_precision,
    hub,
    interactive,
    memory,
    misfits,
    options,
    resuming,
    saving,
    searches,
    training,
    translation,
)


@functools.cache
def apply() -> None:
    """Mend what the probes find broken; once."""
    checkpoints.load_checkpoints_safely()
    checkpoints.broadcast_plain_configuration()
    checkpoints.unpack_archives_inside_their_folder()
    contents.look_at_what_is_read()
    contents.fit_optimizer_states()
    distributed.follow_torchrun()
    distributed.join_the_others_under_hydra()
    distributed.train_on_processors()
    distributed.wrap_models_on_processors()
    half_precision.flatten_on_gpus_only()
    half_precision.take_bfloat16_for_no_tpu()
    hub.copy_the_state_of_tasks()
    hub.generate_as_asked()
    hub.refuse_options_of_other_tasks()
    hub.take_the_task_asked_for()
    interactive.print_every_letter()
    interactive.segment_long_words()
    interactive.translate_every_line()
    memory.keep_freed_memory()
    memory.keep_few_products()
    misfits.refuse_adaptive_loss_of_a_full_softmax()
    misfits.refuse_models_of_one_pair_of_languages()
    misfits.refuse_tasks_without_what_the_model_takes()
    options.read_options_without_eval()
    options.refuse_references()
    options.quote_file_names()
    options.show_help_of_all_options()
    resuming.name_damaged_checkpoints()
    resuming.pass_over_damaged_checkpoints()
    resuming.name_checkpoints_that_do_not_fit()
    resuming.refuse_other_words()
    saving.save_checkpoints_whole()
    saving.copy_checkpoints_whole()
    searches.count_groups_by_their_place_in_the_batch()
    searches.refuse_what_no_search_does()
    searches.refuse_without_constraints()
    training.finish_the_epoch_on_resume()
    training.read_numbers_of_manual_schedules()
    training.keep_the_batches_on_resume()
    training.remember_lost_patience()
    training.forget_the_training_before()
    training.leave_a_finished_training_alone()
    training.restore_numpy_compat()
    translation.load_models_by_themselves()
    translation.leave_parameters_to_the_checkpoint()
    training.find_buckets_with_numpy_2()
    training.keep_the_last_batch()
    translation.use_no_fused_encoder_layer()
    translation.block_repeated_ngrams()
    translation.replace_unknown_words_by_attention()


apply()
