# Shared code of the experiments; each run.sh sources this file with its arguments:
#
#   [NAME=...] [SEEDS="1 2 3"] [SHARDS=4] [WORKERS=8] [ORIG=DIR] run.sh RECIPE OUT [--smoke] [hydra override ...]
#
# RECIPE is the name of a configuration beside run.sh, without .yaml.  OUT is a folder for all results.  Trainings and
# translations are in OUT/NAME.  NAME is the recipe by default; give a variant (model._name=...) its own NAME.  A
# model is trained with each seed, and several seeds also form an ensemble.  SHARDS is the number of processes that
# translate a test part, distributed over all GPUs.  WORKERS is the number of processes that prepare the text.  ORIG is
# a folder with files that you already have. --smoke runs everything on small invented data, in a minute.  Each command
# is shown before it runs.  After an interruption, run the same command again: it keeps prepared data, continues a
# training, and starts translation again.
set -euo pipefail
unset CDPATH  # if CDPATH is set, cd prints the folder
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
experiment=$(basename "$here")
if [ $# -lt 2 ] || [ ! -f "$here/$1.yaml" ] || [[ $2 = -* ]]; then
    sed -n '3,11s/^# \{0,1\}//p' "$here/../experiment.sh"
    sed -n '3,/^source/s/^# //p' "$0"
    echo "RECIPE is one of: $(cd "$here" && LC_ALL=C && echo *.yaml | sed 's/\.yaml//g')"
    exit 2
fi >&2
recipe=$1
name=${NAME:-$recipe}
out=$2
shift 2
smoke=()
overrides=()
small=()
if [ "${1:-}" = --smoke ]; then
    shift
    smoke=(--smoke)
    ORIG=  # --smoke invents the files
    small=(--batch-size 2)  # fairseq-generate crashes in a process without batches
    case $recipe in
        convs2s*) overrides=(model._name=convs2s_tiny) ;;
        conv_encoder*) overrides=(model._name=conv_encoder_tiny) ;;
        weighted_transformer*) overrides=(model._name=weighted_transformer_tiny) ;;
    esac
    overrides+=(optimization.max_update=2 'optimization.update_freq=[1]' dataset.num_workers=0
        dataset.required_batch_size_multiple=1 distributed_training.distributed_world_size=1)
fi
for word; do
    if [[ $word = -* ]]; then
        echo "$word: expected a hydra override, name=value; put --smoke directly after OUT" >&2
        exit 2
    fi
done
overrides+=("$@")
mkdir -p "$out"
out=$(cd "$out" && pwd)  # hydra changes the working directory
seeds=${SEEDS:-1}
shards=${SHARDS:-1}
if [[ ! $shards =~ ^[1-9][0-9]*$ ]]; then
    echo "SHARDS: must be a positive integer, got $shards" >&2
    exit 2
fi
checkpoint=checkpoint_best.pt
all_gpus() { nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -; }
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-$(all_gpus)}"
export PYTHONWARNINGS=ignore  # hide deprecation warnings in fairseq

# Print a command as a user would type it, and run it. One printf prints the whole line, because shards write at the
# same time.
run() {
    printf '\n$%s\n' "$(printf ' %q' "$@")"
    "$@"
}

# Announce a step and its duration.
step() {
    [ ${#smoke[@]} = 0 ] || set -- "$1" "seconds with --smoke"
    printf '\n== %s: %s\n' "$1" "$2"
}

# Binarise subwords, or words with --words, and set `data`.
prepare() {
    step Data "a download, then minutes (IWSLT'14) to hours (WMT'14), divided among WORKERS"
    run python "$root/examples/prepare" "$experiment" "$out" --workers "${WORKERS:-1}" ${ORIG:+--orig "$ORIG"} \
        ${smoke[@]+"${smoke[@]}"} "$@"
    data=$out/data-bin
    [ ! -d "$out/data-bin-words" ] || [ "${1:-}" != --words ] || data=$out/data-bin-words
}

# Train with each seed.
train() {
    local seed save
    step Training "hours (IWSLT'14) to weeks (WMT'14) on a GPU (an estimate); a stopped training is resumed"
    for seed in $seeds; do
        save=$out/$name/seed$seed
        run fairseq-hydra-train --config-dir "$here" --config-name "$recipe" "task.data='$data'" \
            "common.user_dir='$root/user_dir'" "common.seed=$seed" "checkpoint.save_dir='$save'" \
            "hydra.run.dir='$save/hydra'" ${overrides[@]+"${overrides[@]}"}
    done
}

# generate PART [fairseq-generate option ...]: translate with each seed, and with the ensemble.  Newer fairseq versions
# ignore --num-shards and --shard-id and use the rank of the process.
generate() {
    local part=$1 seed path paths=
    step "Translation of $part" "minutes on a GPU"
    shift
    for seed in $seeds; do
        path=$out/$name/seed$seed/$checkpoint
        paths=${paths:+$paths:}$path
        translate "$part" "$path" "$out/$name/seed$seed" "$@"
    done
    case $seeds in *' '*) translate "$part" "$paths" "$out/$name/ensemble" "$@" ;; esac
}

translate() {
    local part=$1 path=$2 results=$3 shard pids=() pid on=()
    shift 3
    rm -f "$results"/shard*/"generate-$part.txt"  # remove results of an earlier call with more shards
    for ((shard = 0; shard < $shards; shard++)); do
        # Otherwise all processes use the first GPU.
        [ "${#gpus[@]}" -lt 2 ] || on=(env "CUDA_VISIBLE_DEVICES=${gpus[shard % ${#gpus[@]}]}")
        run ${on[@]+"${on[@]}"} fairseq-generate "$data" --user-dir "$root/user_dir" --path "$path" \
            --gen-subset "$part" --distributed-world-size "$shards" --distributed-rank "$shard" \
            --results-path "$results/shard$shard" ${small[@]+"${small[@]}"} "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
}

# score PART [fairseq-plugins score option ...]: score each seed, their mean, and the ensemble.
score() {
    local part=$1 seed generated=()
    shift
    for seed in $seeds; do
        generated+=(--generated "$out/$name/seed$seed"/shard*/"generate-$part.txt")
    done
    run fairseq-plugins score "${generated[@]}" "$@"
    case $seeds in
        *' '*) run fairseq-plugins score --generated "$out/$name/ensemble"/shard*/"generate-$part.txt" "$@" ;;
    esac
    [ ${#smoke[@]} = 0 ] || echo "--smoke: after two updates a score means nothing; this run only shows that all steps work"
}

# Extract a dictionary for unknown words.  This is done before the training, so that a missing eflomal is noticed early.
align_words() {
    lexicon=$out/lexicon
    [ -f "$lexicon/dictionary.txt" ] || step Alignment "minutes (IWSLT'14) to hours (WMT'14) on all cores"
    [ -f "$lexicon/dictionary.txt" ] || run fairseq-plugins lexicon --source "$out/tmp/train.$source" \
        --target "$out/tmp/train.$target" --output "$lexicon"
}

# Keep test parts as text, because only text contains the unknown words, and set `data` and `unknown`.
prepare_unknown_words() {
    local raw=$out/data-raw-words prefixes
    if [ ! -d "$raw" ]; then
        prefixes=$(cd "$out" && for file in test*.reference; do printf '%s,' "$out/tmp/${file%.reference}"; done)
        rm -rf "$raw.partial"
        run fairseq-preprocess --dataset-impl raw --source-lang "$source" --target-lang "$target" \
            --srcdict "$data/dict.$source.txt" --tgtdict "$data/dict.$target.txt" --testpref "${prefixes%,}" \
            --destdir "$raw.partial"
        mv "$raw.partial" "$raw"
    fi
    data=$raw
    unknown=(--dataset-impl raw --replace-unk "$lexicon/dictionary.txt")
}
