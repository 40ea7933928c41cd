#!/usr/bin/env bash
# Train the Weighted Transformer or fairseq's own on prepared Multi30k data: the same sizes, batches, learning rates of
# the network and updates; then translate the test part and print its detokenised BLEU.
#
#   weighted_transformer.sh PREPARED OUT weighted_transformer|transformer SEED [fairseq-train option ...]
#
# The options win over the recipe; an interrupted run goes on where it was.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
prepared=$1 out=$2 arch=$3 seed=$4
shift 4
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

case $arch in
    transformer) model=(--arch transformer --share-all-embeddings --criterion label_smoothed_cross_entropy) ;;
    weighted_transformer) model=(--arch weighted_transformer --criterion weighted_label_smoothed_cross_entropy) ;;
    *) echo "$arch: expected weighted_transformer or transformer" >&2; exit 2 ;;
esac

fairseq-train "$prepared/data-bin" --user-dir "$here/../../user_dir" --save-dir "$out" --seed "$seed" "${model[@]}" \
    --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 192 --encoder-ffn-embed-dim 768 \
    --encoder-attention-heads 8 --decoder-attention-heads 8 --dropout 0.1 --attention-dropout 0.1 \
    --optimizer simplex_adam --lr-scheduler weighted_inverse_sqrt --lr-scale 0.7 --warmup-updates 400 \
    --branch-lr-scale 0.1 --branch-warmup-updates 40 --label-smoothing 0.1 --max-tokens 1500 --max-update 1500 \
    --validate-interval-updates 100 --save-interval-updates 500 --keep-interval-updates 1 --no-epoch-checkpoints \
    --log-format simple --log-interval 100 --num-workers 0 "$@" 2>&1 | tee -a "$out/train.log"

"$here/score.sh" "$prepared" "$out"
