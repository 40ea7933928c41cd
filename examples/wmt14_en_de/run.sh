#!/usr/bin/env bash
# WMT'14 English-German, from data to scores; without arguments, run.sh prints its usage.
source "$(dirname "$0")/../experiment.sh"
source=en target=de
case $recipe in
    convs2s)  # the length penalty is tuned on newstest2015 (ConvS2S, section 4.3)
        prepare
        train
        beam=(--beam 5 --remove-bpe --tokenizer moses --source-lang en --target-lang de)
        generate test1 "${beam[@]}" --nbest 5
        first=$out/$name/seed${seeds%% *}  # all seeds use this seed's penalty
        run fairseq-plugins tune-length "$first"/shard*/generate-test1.txt --reference "$out/test1.reference" |
            tee "$first/tune-length"
        alpha=$(sed -n 's/^best.*--lenpen //p' "$first/tune-length")
        generate test "${beam[@]}" --lenpen "$alpha"
        score test --reference "$out/test.reference" --tokenised "$out/tmp/test.de"
        ;;
    conv_encoder)  # words, scored on newstest2015
        prepare --words
        align_words
        train
        prepare_unknown_words
        generate test1 --beam 5 --source-lang en --target-lang de "${unknown[@]}"
        score test1 --detokenise de --reference "$out/test1.reference" --tokenised "$out/tmp/test1.de"
        ;;
    weighted_transformer*)  # the last checkpoint; table 2 uses newstest2013
        prepare
        train
        checkpoint=checkpoint_last.pt
        for part in test test2; do
            generate $part --beam 4 --lenpen 0.6 --remove-bpe --tokenizer moses --source-lang en --target-lang de
            score $part --reference "$out/$part.reference" --tokenised "$out/tmp/$part.de"
        done
        ;;
esac
