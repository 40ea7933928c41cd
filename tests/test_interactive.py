"""``fairseq-interactive`` prints one translation for every line, whatever the line contains."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_plugins.convs2s.model import ConvS2SModel
from fairseq_plugins.repairs.texts import read_every_line
from tests.commands import USER_DIR, hypotheses, run, save_model
from tests.conftest import ARCHITECTURES, enliven, random_model

POSITIONS = 64
SAME = ["w1 w2", "w1\tw2", "w1\rw2", " w1 \u2028 w2\r", "w1\u00a0w2", "\u3000w1\x0bw2\x1c"]
ODD = [
    "",
    " \t\u00a0 ",
    "w3 " * 10_000,
    "w3 " * (POSITIONS - 1),
    "never seen",
    "\U0001f600 w1 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\u0645\u0631\u062d\u0628\u0627 w1 \u202b\u05e9\u05dc\u05d5\u05dd",
    "</s>",
    "<s> w1 </s> Name <pad> w3",
    "<pad> <pad>",
    "<pad> w1",
    "<unk> w1",
    "\0 w1",
    "w1 \udcff\udcfew2",
]
LINES = [*ODD, *SAME, "w1 w2 without an end"]
TEXT = "\n".join(LINES).encode(errors="surrogateescape")  # the last line but one is not UTF-8


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return ``checkpoint(architecture)``, the path of a random model."""
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), source_lang="src", target_lang="tgt"))
    folder = tmp_path_factory.mktemp("interactive")

    @functools.cache
    def checkpoint(architecture: str) -> Path:
        options = {"max_source_positions": POSITIONS, "max_target_positions": POSITIONS, "criterion": "cross_entropy"}
        args, model = random_model(architecture, task, **options, task="translation")
        enliven(model)
        return save_model(model, args, folder / f"{architecture}.pt")

    return checkpoint


def command(data: Path, path: Path, *options: object) -> list[object]:
    return ["interactive", data, "--user-dir", USER_DIR, "--path", path, "--max-len-b", 6, *options]


def cut_lines(log: str) -> list[tuple[str, str, str]]:
    """Return the line, its number of tokens, and the number of translated tokens of each warning."""
    return re.findall(r"line (\d+) has (\d+) tokens\D*(\d+)", log)


@pytest.mark.parametrize("replace", [[], ["--replace-unk", "--unkpen", -20]], ids=["", "replace"])
@pytest.mark.parametrize(
    "architecture", [ARCHITECTURES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES[1:])]
)
def test_every_line_has_its_translation(data, checkpoint, tmp_path, architecture, replace) -> None:
    options = ["--buffer-size", 8, "--batch-size", 4, "--max-tokens", 2 * POSITIONS, *replace]
    result = run(*command(data, checkpoint(architecture), *options), stdin=TEXT)
    found, log = result.stdout, result.stderr
    for kind in "SHDP":
        numbers = [int(number) for number in re.findall(rf"^{kind}-(\d+)\t", found, flags=re.MULTILINE)]
        assert numbers == list(range(len(LINES)))
    texts = {number: beams[0][1] for number, beams in hypotheses(found).items()}
    start = len(ODD)
    assert {texts[number] for number in range(start, start + len(SAME))} == {texts[start]}
    assert texts[2] == texts[3]
    assert cut_lines(found + log) == [("3", "10001", "63")]
    if replace:
        assert set(texts[4].split()) <= {"never", "seen"}
        assert set(texts[8].split()) <= {"w1", "Name", "w3"}
        assert set(texts[7].split()) == {"<unk>"}  # without a word that --replace-unk could copy
        assert set(texts[start - 1].split()) <= {"w1", "\ufffd\ufffdw2"}

    (tmp_path / "lines").write_bytes(TEXT)
    if replace and architecture == ARCHITECTURES[0]:
        again = run(*command(data, checkpoint(architecture), *options, "--input", tmp_path / "lines"))
        assert {number: beams[0][1] for number, beams in hypotheses(again.stdout).items()} == texts


def test_a_batch_may_be_shorter_than_the_model(data: Path, checkpoint) -> None:
    """Lines without their constraints must fit into --max-tokens; a blank line with a constraint is translated."""
    lines = "w1\t\tw5\n" + "w1 " * 30 + "\tw4\n\tw6\n"
    options = ["--max-tokens", 20, "--buffer-size", 4, "--constraints", "unordered"]
    result = run(*command(data, checkpoint(ARCHITECTURES[0]), *options), stdin=lines)
    found = hypotheses(result.stdout)
    assert sorted(found) == [0, 1, 2]
    assert "w5" in found[0][0][1].split()
    assert "w6" in found[2][0][1].split()
    assert "w4" in found[1][0][1].split()
    assert cut_lines(result.stdout + result.stderr) == [("2", "31", "19")]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("translation", ["--nbest", 2, "--print-alignment"]),
        ("translation_fast", ["--nbest", 2, "--print-alignment"]),
        ("translation", ["--constraints"]),
        ("translation_fast", ["--replace-unk", "--unkpen", -20]),
    ],
)
def test_a_blank_line_stays_blank(data: Path, checkpoint, task: str, options: list[object]) -> None:
    """A blank line stays blank with other sentences in its batch, and has as many hypotheses as other lines."""
    options = ["--task", task, "--buffer-size", 4, "--batch-size", 4, *options]
    text = "\nw1 w2\n \t\u00a0\n"
    found = hypotheses(run(*command(data, checkpoint(ARCHITECTURES[0]), *options), stdin=text).stdout)
    assert found[0] == found[2] == [(0.0, "")] * len(found[1]) != found[1]


def test_a_blank_line_stays_blank_from_python(data: Path, checkpoint, caplog) -> None:
    """If a prefix is given, the translation continues it; fairseq logs nothing at a call."""
    path = checkpoint(ARCHITECTURES[0])
    hub = ConvS2SModel.from_pretrained(str(path.parent), path.name, str(data))
    caplog.clear()
    with caplog.at_level("INFO"):
        blank, other = hub.translate(["", "w1 w2"], max_len_b=6)
    assert not [record for record in caplog.records if record.name.startswith("fairseq")]
    assert not blank
    assert other
    prefix = torch.tensor([[hub.tgt_dict.index("w5")]])
    ((best, *_),) = hub.generate([hub.encode("")], max_len_b=6, inference_step_args={"prefix_tokens": prefix})
    assert hub.decode(best["tokens"]).startswith("w5")


def test_every_line_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first line that is not UTF-8 is reported; a byte order mark is removed."""
    (tmp_path / "lines").write_bytes(b"\xef\xbb\xbfa\rb\n\n\xff c\n\xff")
    read = read_every_line(None, str(tmp_path / "lines"), 2)
    assert list(read) == [["a\rb", ""], ["\ufffd c", "\ufffd"]]
    assert [re.findall(r"line \d+", message) for message in caplog.messages] == [["line 3"]]
