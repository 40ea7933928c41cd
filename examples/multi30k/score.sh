#!/usr/bin/env bash
# Translate the test part with the best checkpoint of a run and print its detokenised BLEU and chrF.
#
#   score.sh PREPARED OUT [fairseq-generate option ...]
#
# PREPARED is the output folder of prepare.py, OUT the folder of a training.
set -euo pipefail
unset CDPATH  # if CDPATH is set, cd prints the folder
[ $# -ge 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
prepared=$1 out=$2
shift 2
pair=$(cd "$prepared/data-bin" && ls test.*-*.bin | head -n 1 | cut -d. -f2)  # such as en-de

fairseq-generate "$prepared/data-bin" --user-dir "$(dirname "$0")/../../user_dir" --path "$out/checkpoint_best.pt" \
    --source-lang "${pair%-*}" --target-lang "${pair#*-}" \
    --beam 5 --max-tokens 3000 --remove-bpe --tokenizer moses \
    --results-path "$out" "$@" 2>&1 | tee "$out/generate.log"

# fairseq writes translations in the order of its batches, as D-<number> tab score tab detokenised text.
grep -a '^D-' "$out/generate-test.txt" | sort -t- -k2n | cut -f3 >"$out/test.hypotheses"
sacrebleu "$prepared/test.reference" -i "$out/test.hypotheses" -m bleu chrf | tee "$out/scores.json"
