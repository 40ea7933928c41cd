#!/usr/bin/env bash
# WMT'16 English-Romanian, from the data to the score; run.sh without arguments says how.  WORDS=1 trains ConvS2S on words.
source "$(dirname "$0")/../experiment.sh"
source=en target=ro
case $recipe${WORDS:+-words} in
    convs2s)
        prepare
        train
        unknown=(--remove-bpe)
        ;;
    *)
        prepare --words
        train
        prepare_unknown_words
        ;;
esac
generate test --beam 5 --tokenizer moses --source-lang en --target-lang ro "${unknown[@]}"
score test --reference "$out/test.reference"
