#!/usr/bin/env bash
# WMT'16 English-Romanian, from data to scores; without arguments, run.sh prints its usage.
# WORDS=1 trains ConvS2S on words; NAME is then convs2s-words by default.
source "$(dirname "$0")/../experiment.sh"
name=${NAME:-$recipe${WORDS:+-words}}
source=en target=ro
case $recipe${WORDS:+-words} in
    convs2s)
        prepare
        train
        decoding=(--remove-bpe --tokenizer moses) scoring=()
        ;;
    *)
        prepare --words
        align_words
        train
        prepare_unknown_words
        decoding=("${unknown[@]}") scoring=(--detokenise ro)
        ;;
esac
generate test --beam 5 --source-lang en --target-lang ro "${decoding[@]}"
score test ${scoring[@]+"${scoring[@]}"} --reference "$out/test.reference"
