#!/usr/bin/env bash
# Train a translation model from scratch in a few minutes with fairseq's own commands: data, subword segmentation,
# training, translation, scores, and a picture of the attention.  Each command is shown before it runs.
#
#   [ARCH=convs2s_tiny] [VOCAB_SELECTION=1] [OUT=examples/quickstart/out] run.sh [fairseq-train option ...]
#
# ARCH is any translation architecture of the plugin or of fairseq.  VOCAB_SELECTION=1 trains and translates with
# candidate words, from a lexicon that is extracted from the training part.  The options override the options below.
# Each run starts from scratch.
set -euo pipefail
unset CDPATH  # if CDPATH is set, cd prints the folder
arch=${ARCH:-convs2s_tiny}
out=${OUT:+$(mkdir -p "$OUT" && cd "$OUT" && pwd)}
cd "$(dirname "$0")/../.."
out=${out:-examples/quickstart/out}
model=$out/$arch
# On a busy machine, several threads of such a small model wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONWARNINGS=ignore  # hide deprecation warnings in fairseq

# Print a command as a user would type it, and run it.
run() {
    local word
    printf '\n$'
    for word; do
        case $word in
            *[!A-Za-z0-9_./:=+-]*) printf " '%s'" "$word" ;;
            *) printf ' %s' "$word" ;;
        esac
    done
    printf '\n'
    "$@"
}

# Each command of fairseq first prints its configuration on one line, which fills many screens.
without_configuration() { grep --line-buffered -v "{'_name'"; }

step() { printf '\n== %s\n' "$*"; }

for name in text bpe data-bin lexicon "$arch"; do  # removed below; folders of earlier versions have codes and text/train.en
    if [ -e "$out/$name" ] && [ ! -e "$out/.quickstart" ] && ! { [ -e "$out/codes" ] && [ -e "$out/text/train.en" ]; }; then
        echo "OUT: $out contains another $name, which the demo would remove; choose a new folder" >&2
        exit 2
    fi
done
mkdir -p "$out"
touch "$out/.quickstart"
rm -rf "$out/text" "$out/bpe" "$out/data-bin" "$out/lexicon" "$model"
mkdir -p "$out/bpe" "$model"

step "1. Data: English and German numbers, dates, amounts, names (seconds)"
run python examples/quickstart/make_data.py "$out/text"

step "2. Subword segmentation: 2000 merges, learned on both languages together (seconds)"
run subword-nmt learn-joint-bpe-and-vocab --input "$out/text/train.en" "$out/text/train.de" --symbols 2000 \
    --output "$out/codes" --write-vocabulary "$out/bpe/vocabulary.en" "$out/bpe/vocabulary.de"
for language in en de; do
    for part in train valid test; do
        run subword-nmt apply-bpe --codes "$out/codes" \
            --input "$out/text/$part.$language" --output "$out/bpe/$part.$language"
    done
done

step "3. Binary data for fairseq (seconds)"
run fairseq-preprocess --source-lang en --target-lang de --joined-dictionary --destdir "$out/data-bin" \
    --trainpref "$out/bpe/train" --validpref "$out/bpe/valid" --testpref "$out/bpe/test"

criterion=(--criterion cross_entropy) optimizer=adam
case $arch in
    weighted_transformer*)  # this optimizer keeps the weights of the branches on the simplex
        criterion=(--criterion weighted_label_smoothed_cross_entropy --label-smoothing 0.1) optimizer=simplex_adam
        ;;
esac
task=()
if [ -n "${VOCAB_SELECTION:-}" ]; then
    step "   The lexicon for vocabulary selection (less than a minute)"
    run fairseq-plugins lexicon --source "$out/bpe/train.en" --target "$out/bpe/train.de" --output "$out/lexicon"
    # The vocabulary is small, so only 100 frequent words (1000 by default) are candidates of every batch.
    task=(--task translation_fast --candidates "$out/lexicon" --candidates-per-word 10 --frequent-candidates 100)
    criterion=(--criterion vocab_selection_cross_entropy)
fi

step "4. Training of $arch (with convs2s_tiny, most of the demo's 5 to 10 minutes on two cores)"
run fairseq-train "$out/data-bin" --user-dir user_dir --arch "$arch" --save-dir "$model" ${task[@]+"${task[@]}"} \
    "${criterion[@]}" --optimizer "$optimizer" --dropout 0.1 --batch-size 64 --max-update 2400 \
    --adam-betas '(0.9, 0.98)' --clip-norm 0.1 --lr 0.003 --lr-scheduler cosine --warmup-updates 200 \
    --no-epoch-checkpoints --log-format simple --log-interval 50 --num-workers 0 "$@" \
    2>&1 | without_configuration

step "5. Translation of the test part (less than a minute)"
run fairseq-generate "$out/data-bin" --user-dir user_dir --path "$model/checkpoint_best.pt" ${task[@]+"${task[@]}"} \
    --beam 5 --batch-size 64 --remove-bpe --results-path "$model" 2>&1 | without_configuration

step "6. Translation of single sentences (seconds)"
# The translation reorders date and verb, as the picture of step 8 shows.
grep -m 3 'was born on' "$out/text/test.en" >"$model/sentences.en"
run fairseq-interactive "$out/data-bin" --user-dir user_dir --path "$model/checkpoint_best.pt" ${task[@]+"${task[@]}"} \
    --beam 5 --bpe subword_nmt --bpe-codes "$out/codes" --input "$model/sentences.en" \
    2>&1 | without_configuration

step "7. Scores (seconds)"
# The expected scores are known for the defaults only.
check=()
[ "$arch" != convs2s_tiny ] || [ -n "${VOCAB_SELECTION:-}" ] || [ $# -gt 0 ] || check=(--check)
run python examples/quickstart/report.py "$out/text" "$model/generate-test.txt" ${check[@]+"${check[@]}"}

step "8. A picture of the attention (seconds)"
run fairseq-plugins plot-attention "$out/data-bin" --path "$model/checkpoint_best.pt" --bpe-codes "$out/codes" \
    --input "$(head -n 1 "$model/sentences.en")" --output "$model/attention.png"
