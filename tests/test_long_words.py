"""Words of many thousand letters."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path

import pytest
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from subword_nmt.apply_bpe import BPE

from fairseq_plugins.cli.own_data import parallel_text
from fairseq_plugins.common.text import LONGEST, segment

LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learn codes from words with a long word among them."""
    folder = tmp_path_factory.mktemp("codes")
    random.seed(1)
    words = ["".join(random.choices(LETTERS, k=random.randint(2, 9))) for _ in range(200)]
    text = "\n".join(" ".join(random.choices(words, k=10)) for _ in range(500)) + "\n"
    for name, more in (("plain", ""), ("code", f"{words[0]} {'xyz' * 50_000} {words[0]}\n")):
        (folder / "text").write_text(text + (more or f"{words[0]} {words[0]}\n"))
        parallel_text.learn_codes([folder / "text"], 100, folder / name)
    assert (folder / "plain").read_text() == (folder / "code").read_text()
    return folder / "code"


@pytest.mark.parametrize(
    "line", ["", " ", "abc  dog ", "hide " * LONGEST, "f" * LONGEST, f" a {'abcdefghijk' * LONGEST} b"]
)
def test_long_words_do_not_change_other_words(line: str, codes: Path) -> None:
    """subword-nmt alone segments the short words; removing the separators restores the text."""
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file)
    ours, fairseq_s = parallel_text.segmenter(codes), SubwordNMTBPE(Namespace(bpe_codes=str(codes), bpe_separator="@@"))
    found = ours(line)
    assert found == fairseq_s.encode(line) == segment(bpe, line)
    assert found.replace("@@ ", "").split() == line.split()
    if max(map(len, line.split(" "))) <= LONGEST:
        assert found == bpe.process_line(line)
