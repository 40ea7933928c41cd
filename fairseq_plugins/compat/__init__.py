"""The one place that touches fairseq, torch and numpy themselves.

Every patch has a probe: it asks for what it mends, never for a version, and leaves alone what is already right.
``fairseq_plugins`` imports this package, so ``--user-dir`` is enough to get all of them.
"""

import functools

from fairseq_plugins.compat import (
    checkpoints,
    contents,
    distributed,
    interactive,
    memory,
    options,
    resuming,
    saving,
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
    interactive.print_every_letter()
    interactive.segment_long_words()
    interactive.translate_every_line()
    memory.keep_freed_memory()
    memory.keep_few_products()
    options.read_options_without_eval()
    options.refuse_references()
    options.quote_file_names()
    options.show_help_of_all_options()
    resuming.pass_over_damaged_checkpoints()
    resuming.name_checkpoints_that_do_not_fit()
    resuming.refuse_other_words()
    saving.save_checkpoints_whole()
    saving.copy_checkpoints_whole()
    training.finish_the_epoch_on_resume()
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
