#!/usr/bin/env bash
# WMT'14 English-French, from the data to the score; run.sh without arguments says how.
source "$(dirname "$0")/../experiment.sh"
source=en target=fr
unknown=(--remove-bpe)
beam=(--beam 5)
case $recipe in
    conv_encoder)
        prepare --words
        train
        prepare_unknown_words
        ;;
    convs2s)
        prepare
        train
        ;;
    weighted_transformer*)
        prepare
        train
        checkpoint=checkpoint_last.pt
        beam=(--beam 4 --lenpen 0.6)
        ;;
esac
generate test "${beam[@]}" "${unknown[@]}" --tokenizer moses --source-lang en --target-lang fr
score test --reference "$out/test.reference" --tokenised "$out/tmp/test.fr"
