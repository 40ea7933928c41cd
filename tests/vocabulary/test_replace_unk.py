"""``--replace-unk`` of the commands replaces unknown words by attended source words; see also `test_unknown_words`."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from tests.commands import USER_DIR, hypotheses, run, save_model
from tests.conftest import random_model

EOS, PAD, UNK = 2, 1, 3
FCONV = {f"{side}_embed_dim": 16 for side in ("encoder", "decoder", "decoder_out")}
FCONV |= {f"{side}_layers": "[(16, 3)] * 2" for side in ("encoder", "decoder")}
MODELS = {
    "convs2s_tiny": {},
    "conv_encoder_tiny": {},
    "weighted_transformer_tiny": {"share_embeddings": "decoder", "branch_constraint": "softmax"},  # for any optimizer
    "fconv": FCONV,
    "transformer_tiny": {},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a binary and a ``raw`` corpus: w is copied to t, and names, which occur once, are in no dictionary."""
    folder = tmp_path_factory.mktemp("names")
    random.seed(1)
    names = 0
    for split, size in (("train", 400), ("valid", 16), ("test", 24)):
        sentences = []
        for _ in range(size):
            words = random.choices([f"w{number}" for number in range(12)], k=random.randint(1, 7))
            for _ in range(random.randint(0, 2)):
                names += 1
                words.insert(random.randint(0, len(words)), f"Name{names}")
            sentences.append(" ".join(words) + "\n")
        (folder / f"{split}.src").write_text("".join(sentences))
        (folder / f"{split}.tgt").write_text("".join(sentences).replace("w", "t"))
    languages = ["-s", "src", "-t", "tgt", "--workers", 1]
    prefixes = [f"--{name}pref={folder / name}" for name in ("train", "valid", "test")]
    dictionaries = [f"--{side}dict={folder / 'bin'}/dict.{side}.txt" for side in ("src", "tgt")]
    thresholds = ["--thresholdsrc", 2, "--thresholdtgt", 2]
    run("preprocess", *languages, *prefixes, *thresholds, "--destdir", folder / "bin")
    options = ["--dataset-impl", "raw", "--destdir", folder / "raw"]
    run("preprocess", *languages, prefixes[-1], *dictionaries, *options)
    return folder


@pytest.fixture(scope="module")
def translations(corpus: Path) -> Path:
    """Write a dictionary for half of the test set's source words."""
    words = sorted(set((corpus / "test.src").read_text().split()))
    (corpus / "dictionary").write_text("".join(f"{word} {word}-translated\n" for word in words[::2]))
    return corpus / "dictionary"


def babble(model: torch.nn.Module, size: int) -> None:
    """Train a model to copy words or to output unknown words, so that it attends to each word in turn."""
    model.eval()  # returns attention, and drops nothing
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for step in range(150):
        length = 3 + step // 25  # short sentences first, because they teach the order
        tokens = torch.randint(UNK, size, (32, length))
        source = torch.nn.functional.pad(tokens, (0, 1), value=EOS)
        previous = tokens.roll(1, dims=1).index_fill(1, torch.tensor(0), EOS)
        logits, extra = model(source, torch.full((32,), length + 1), previous)
        wanted = tokens.where(torch.rand(tokens.shape) < 0.6, UNK)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        # The loss also suppresses symbols that printed hypotheses omit.
        loss = loss + logits[..., :UNK].add(5).relu().mean()
        attention = extra if torch.is_tensor(extra) else extra["attn"][0]
        if attention.requires_grad:  # an LSTM learns its attention from the words alone
            loss = loss - attention.diagonal(dim1=1, dim2=2).clamp(min=1e-6).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def checkpoint(corpus: Path):
    """Return ``checkpoint(architecture)``, the path of a checkpoint of a model that cannot translate."""
    task = TranslationTask.setup_task(TranslationConfig(data=str(corpus / "bin")))

    @functools.cache
    def checkpoint(architecture: str) -> Path:
        options = {**MODELS[architecture], "criterion": "cross_entropy"}
        args, model = random_model(architecture, task, **options, task="translation")
        babble(model, len(task.target_dictionary))
        return save_model(model, args, corpus / f"{architecture}.pt")

    return checkpoint


@functools.cache
def generate(corpus: Path, checkpoints: Path | str, *options: object, unknown: float = 1) -> str:
    """Translate the test set in two left-padded batches with different lengths and many unknown words."""
    search = ["--unkpen", -unknown, "--max-len-b", 6, "--nbest", 3, "--batch-size", 12]
    command = [corpus / "raw", "--dataset-impl", "raw", "--user-dir", USER_DIR, "--path", checkpoints, *search]
    return run("generate", *command, *options).stdout


def alignments(output: str) -> dict[int, list[str]]:
    """Return the A lines of each sentence."""
    found: dict[int, list[str]] = {}
    for number, text in re.findall(r"^A-(\d+)\t(.*)$", output, flags=re.MULTILINE):
        found.setdefault(int(number), []).append(text)
    return found


def replace_by_hand(
    corpus: Path, output: str, dictionary: Path | None, offset: int = 0
) -> dict[int, list[tuple[float, str]]]:
    """Replace unknown words in an output with --print-alignment by the A lines, and return the hypotheses."""
    translations = dict(line.split() for line in dictionary.read_text().splitlines()) if dictionary else {}
    sources = [line.split() for line in (corpus / "test.src").read_text().splitlines()]
    replaced: dict[int, list[tuple[float, str]]] = {}
    for number, beams in hypotheses(output).items():
        for (score, text), line in zip(beams, alignments(output)[number], strict=True):
            words = text.split()
            for source, target in (map(int, pair.split("-")) for pair in line.split()):
                if words[target] == "<unk>":
                    copied = sources[number][min(max(source + offset, 0), len(sources[number]) - 1)]
                    words[target] = translations.get(copied, copied)
            replaced.setdefault(number, []).append((score, " ".join(words)))
    return replaced


def unknown(output: str) -> int:
    return sum(text.split().count("<unk>") for beams in hypotheses(output).values() for _, text in beams)


def first_is_fast(architectures: Iterable[str]) -> list[object]:
    """In short test runs, the first architecture represents all others."""
    first, *others = architectures
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("architecture", first_is_fast(MODELS))
def test_generate_replaces_by_the_alignment(corpus, checkpoint, translations, architecture) -> None:
    path = checkpoint(architecture)
    plain = generate(corpus, path, "--print-alignment")
    replaced = generate(corpus, path, "--replace-unk", translations)
    expected = replace_by_hand(corpus, plain, translations)
    assert unknown(plain) > 50
    texts = [text for beams in expected.values() for _, text in beams]
    assert any("Name" in text for text in texts)
    assert any("-translated" in text for text in texts)
    assert hypotheses(replaced) == expected
    assert not alignments(replaced)


def test_an_offset_moves_the_replacements(corpus: Path, checkpoint, translations: Path) -> None:
    path = checkpoint("convs2s_tiny")
    plain = generate(corpus, path, "--print-alignment")
    options = ["--task", "translation_fast", "--attention-offset", 1, "--replace-unk", translations]
    found = hypotheses(generate(corpus, path, *options))
    for offset, equal in ((1, True), (0, False)):
        foreseen = replace_by_hand(corpus, plain, translations, offset)
        assert all(found[number][0][1] == beams[0][1] for number, beams in foreseen.items()) == equal


@pytest.mark.slow
def test_an_ensemble_replaces_by_its_mean_attention(corpus: Path, checkpoint, translations: Path) -> None:
    paths = f"{checkpoint('convs2s_tiny')}:{checkpoint('fconv')}"
    plain = generate(corpus, paths, "--print-alignment")
    expected = replace_by_hand(corpus, plain, translations)
    assert hypotheses(generate(corpus, paths, "--replace-unk", translations)) == expected


def interactive(corpus: Path, checkpoints: Path, text: str, *options: object) -> str:
    search = ["--unkpen", -1, "--max-len-b", 6, "--nbest", 3, "--buffer-size", 12, "--batch-size", 12]
    command = [corpus / "bin", "--user-dir", USER_DIR, "--path", checkpoints, *search, *options]
    return run("interactive", *command, stdin=text).stdout


@pytest.mark.parametrize("architecture", first_is_fast(["convs2s_tiny", "transformer_tiny"]))
def test_interactive_copies_words_that_it_does_not_know(corpus, checkpoint, translations, architecture) -> None:
    """With several buffers, a name of the first buffer recurs in the second."""
    path = checkpoint(architecture)
    text = (corpus / "test.src").read_text()
    plain = interactive(corpus, path, text, "--print-alignment")
    replaced = interactive(corpus, path, text, "--replace-unk", translations)
    assert unknown(plain) > 50
    assert hypotheses(replaced) == replace_by_hand(corpus, plain, translations)
    assert not alignments(replaced)
    assert re.findall(r"^S-\d+\t(.*)$", replaced, flags=re.MULTILINE) == text.splitlines()


def test_sentences_that_are_equal_for_the_model_keep_their_own_words(corpus: Path, checkpoint) -> None:
    names = ["Ann", "Bob", "Cid", "Dot", "Eva"]
    lines = "".join(f"{name} w1\n" for name in [*names, *names]) + "\n"  # the last line stays blank
    found = hypotheses(interactive(corpus, checkpoint("convs2s_tiny"), lines, "--replace-unk"))
    texts = [{word for _, text in found[number] for word in text.split()} for number in range(11)]
    for number, name in enumerate([*names, *names]):
        assert texts[number] & {*names} <= {name}
    assert texts[0] - {"Ann"} == texts[9] - {"Eva"}
    assert "Ann" in texts[0]
    assert texts[10] == set()


def test_models_are_prepared_for_attention_only_when_asked(build, architecture: str) -> None:
    for replace_unk, wanted in ((None, False), ("", True)):
        generation = SimpleNamespace(replace_unk=replace_unk, print_alignment=None, no_beamable_mm=False, beam=2)
        model = build(architecture)
        model.prepare_for_inference_(SimpleNamespace(generation=generation))
        assert bool(model.decoder.need_attn) is wanted
        assert generation.print_alignment is None
