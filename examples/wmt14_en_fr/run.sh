#!/usr/bin/env bash
# WMT'14 English-French, from data to scores; without arguments, run.sh prints its usage.
source "$(dirname "$0")/../experiment.sh"
source=en target=fr
decoding=(--beam 5 --remove-bpe --tokenizer moses) scoring=()
case $recipe in
    conv_encoder)
        prepare --words
        align_words
        train
        prepare_unknown_words
        decoding=(--beam 5 "${unknown[@]}") scoring=(--detokenise fr)
        ;;
    convs2s)
        prepare
        train
        ;;
    weighted_transformer*)
        prepare
        train
        checkpoint=checkpoint_last.pt
        decoding=(--beam 4 --lenpen 0.6 --remove-bpe --tokenizer moses)
        ;;
esac
generate test "${decoding[@]}" --source-lang en --target-lang fr
score test ${scoring[@]+"${scoring[@]}"} --reference "$out/test.reference" --tokenised "$out/tmp/test.fr"
