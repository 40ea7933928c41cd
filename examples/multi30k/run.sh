#!/usr/bin/env bash
# Train an architecture on prepared Multi30k data, translate the test part and print its detokenised BLEU.
#
#   run.sh PREPARED OUT [fairseq-train option ...]
#
# PREPARED is the output folder of prepare.py; OUT receives checkpoints, log and translations.  The options override the
# recipe: `--arch fconv_iwslt_de_en`, `--seed 2`, `--max-epoch 3`.  The same command resumes an interrupted run.
set -euo pipefail
unset CDPATH  # if CDPATH is set, cd prints the folder
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
prepared=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
user_dir=$here/../../user_dir
mkdir -p "$out"

# The recipe is cross-entropy, NAG 0.99, learning rate 0.25 and clipping at 0.1 (ConvS2S section 4.2). A training has 14
# epochs; the learning rate is divided by 10 at epochs 12, 13 and 14.
echo "== Training: half an hour to an hour on one core with convs2s_iwslt_de_en, then a minute of translation"
fairseq-train "$prepared/data-bin" --user-dir "$user_dir" --save-dir "$out" \
    --arch convs2s_iwslt_de_en --dropout 0.3 --criterion cross_entropy \
    --optimizer nag --momentum 0.99 --lr 0.25 --clip-norm 0.1 --lr-scheduler fixed --force-anneal 12 \
    --max-tokens 3000 --max-epoch 14 --no-epoch-checkpoints --log-format simple --log-interval 50 \
    "$@" 2>&1 | tee -a "$out/train.log"

"$here/score.sh" "$prepared" "$out"
