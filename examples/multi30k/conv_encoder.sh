#!/usr/bin/env bash
# Train an encoder of Gehring et al. 2016 or ConvS2S on prepared Multi30k data, all with the same optimizer, batches and
# updates.  Translate the test part and print its detokenised BLEU, in total and by source length.
#
#   conv_encoder.sh PREPARED OUT convolutional|pooling|bilstm|convs2s [fairseq-train option ...]
#
# The options override the recipe.  The same command resumes an interrupted run.
set -euo pipefail
unset CDPATH  # if CDPATH is set, cd prints the folder
[ $# -ge 3 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
prepared=$1 out=$2 encoder=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

case $encoder in
    convolutional | pooling | bilstm)
        model=(--arch conv_encoder --encoder-type "$encoder" --encoder-hidden-size 256 --decoder-hidden-size 256
            --encoder-layers '[(256, 3)] * 6' --aggregation-layers '[(256, 3)] * 3' --init-range 0.2)
        ;;
    convs2s) model=(--arch convs2s_iwslt_de_en) ;;
    *) echo "$encoder: unknown encoder; use convolutional, pooling, bilstm or convs2s" >&2; exit 2 ;;
esac

echo "== Training: at least a quarter of an hour on one core, then a minute of translation"
fairseq-train "$prepared/data-bin" --user-dir "$here/../../user_dir" --save-dir "$out" "${model[@]}" --dropout 0.2 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' \
    --lr 0.004 --lr-scheduler inverse_sqrt --warmup-updates 100 --clip-norm 1 --max-tokens 1500 --max-update 1500 \
    --validate-interval-updates 250 --save-interval-updates 250 --keep-interval-updates 1 --no-epoch-checkpoints \
    --log-format simple --log-interval 50 --num-workers 0 "$@" 2>&1 | tee -a "$out/train.log"

"$here/score.sh" "$prepared" "$out"
python "$here/bleu_by_length.py" "$prepared" "$out/test.hypotheses" | tee "$out/bleu_by_length.txt"
