"""sentencepiece's pieces restore all text, in fairseq's commands and in an exported folder."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fairseq_plugins.cli.own_data import preparation
from fairseq_plugins.export.translate import Translator
from tests.commands import ROOT
from tests.conftest import random_model
from tests.export.exporting import export

# Words with a meaning for sentencepiece or fairseq, all kinds of white space, and letters of many scripts.
ODD = [
    "<unk>", "<s>", "</s>", "<pad>", "<0x41>", "<0x0A>", "\u2581", "\u2581\u2581a", "\ufdd0", "\ufdd1\ufdd0\u2581",
    "#fairseq:overwrite", "madeupword0000", "@@", "@-@", "<<unk>>", "</w>", "\0", "a\0b", "\ufeff", "\ufffd", "\uffff",
    "\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\r", "\t", "\u200b", " ", "  ", " a  b ", "\xa0a\u3000",
    "%(name)s", ":ref:`x <y-z>`", "https://docs.python.org/3", "2026-11-27", "e\u0301é", "ﬁ①Å", "𝒜👩\u200d👩\u200d👧",
    "\U0010ffff", "的对象，见“说明”（可选）。", "これは文です。",
    "Обов’язково", "L’objet", "مرحبا", "नमस्ते", "ไทย", "한국어",
]  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(ODD), st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20)
)
LINES = st.lists(st.builds("".join, st.lists(WORDS, max_size=6)), max_size=6)


class Ways(NamedTuple):
    """The same pieces as used by own-data, by fairseq and by an exported folder."""

    model: Path
    dictionary: Dictionary
    bpe: SentencepieceBPE
    translator: Translator


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """Train pieces on this project's pages, and on odd words that occur often enough to become pieces."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "odd").write_text("".join(f"{word} {word} {word}\n" for word in ODD) * 50, encoding="utf-8", newline="\n")
    preparation.learn_pieces([*sorted((ROOT / "docs").glob("*.md")), folder / "odd"], 800, folder / "model")
    preparation.write_dictionary(folder / "model", folder / "dict.txt")
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    _, model = random_model("convs2s_tiny", task, max_source_positions=1024)
    options = {"pieces": folder / "model", "longest_source": 1024}
    exported = export(model.float(), folder / "exported", dictionary, **options)
    config = Namespace(
        sentencepiece_model=str(folder / "model"), sentencepiece_enable_sampling=False, sentencepiece_alpha=None
    )
    return Ways(folder / "model", dictionary, SentencepieceBPE(config), Translator(exported))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(ODD)
@example((ROOT / "README.md").read_text(encoding="utf-8").split("\n"))
@given(LINES)
def test_all_text_is_restored(ways: Ways, tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    preparation.segment_by_pieces(ways.model, tmp_path / "text", tmp_path / "pieces")
    segmented = (tmp_path / "pieces").read_text(encoding="utf-8").split("\n")
    assert segmented.pop() == ""
    for line, words in zip(lines, segmented, strict=True):
        assert ways.bpe.encode(line) == words
        tokens = ways.dictionary.encode_line(words, add_if_not_exist=False)
        assert len(tokens) == len(words.split(" ")) + 1 if words else 1
        assert not set(tokens[:-1].tolist()) & set(range(4)), "no text is a special symbol"
        assert ways.dictionary.string(tokens) == words
        assert ways.bpe.decode(words) == line
        if line.strip():
            assert ways.translator.words(line) == words.split(" ")
            hypothesis = [(number, 0) for number in tokens.tolist()[:-1]]
            assert ways.translator.text((hypothesis, 0.0), [], None)[0] == line


@pytest.mark.slow
def test_text_without_spaces_is_learned_in_bounded_memory(tmp_path: Path) -> None:
    """sentencepiece uses about 130 bytes per character of a word, and each line here is one word."""
    program = (
        "import random, sys; from pathlib import Path; from resource import *\n"
        "from fairseq_plugins.cli.own_data import preparation\n"
        "text, letters = Path(sys.argv[1], 'text'), [chr(0x4E00 + n) for n in range(2000)]\n"
        "with text.open('w', encoding='utf-8') as file:\n"
        "    file.writelines(''.join(random.choices(letters, k=60)) + '\\n' for _ in range(400_000))\n"
        "preparation.learn_pieces([text], 100, text.with_name('model'))\n"
        "print(getrusage(RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) < 2_000_000  # KiB
