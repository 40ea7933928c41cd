#!/usr/bin/env bash
# IWSLT'14 German-English, from data to scores; without arguments, run.sh prints its usage.
source "$(dirname "$0")/../experiment.sh"
source=de target=en
prepare --words
align_words
train
prepare_unknown_words
generate test --beam 10 --source-lang de --target-lang en "${unknown[@]}"
# The translations are in lower case, unlike the reference.
score test --lowercase --detokenise en --reference "$out/test.reference" --tokenised "$out/tmp/test.en"
