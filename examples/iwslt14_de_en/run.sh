#!/usr/bin/env bash
# IWSLT'14 German-English, from the data to the score; run.sh without arguments says how.
source "$(dirname "$0")/../experiment.sh"
source=de target=en
prepare --words
train
prepare_unknown_words
generate test --beam 10 --source-lang de --target-lang en "${unknown[@]}"
score test --detokenise en --reference "$out/test.reference" --tokenised "$out/tmp/test.en"
