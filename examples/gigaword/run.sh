#!/usr/bin/env bash
# Summarisation on Gigaword, from data to scores; without arguments, run.sh prints its usage.
source "$(dirname "$0")/../experiment.sh"
source=article target=title
prepare
align_words
train
prepare_unknown_words
# Section 4.1: summaries have at least 14 words.
generate test --beam 5 --min-len 14 --source-lang article --target-lang title "${unknown[@]}"
score test --rouge --reference "$out/test.reference"
# DUC-2004 has four references and scores the first 75 bytes.
generate test1 --beam 5 --min-len 14 --source-lang article --target-lang title "${unknown[@]}"
references=("$out/test1.reference")
duc=${ORIG:-$out/orig}/sumdata/DUC2004
for more in "$duc"/task1_ref[1-9].txt "$duc"/task1_ref[1-9].txt.gz; do
    [ ! -f "$more" ] || [[ $more = *.gz && -f ${more%.gz} ]] || references+=("$more")
done
score test1 --rouge --bytes 75 --reference "${references[@]}"
