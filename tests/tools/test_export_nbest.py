"""N-best lists in the format of Moses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fairseq_plugins.tools import cli

GENERATED = """\
S-1\tx
H-1\t-1.0\tno
D-1\t-1.0\tno
P-1\t-1.5000 -0.5000
S-0\tx y
H-0\t-1.0\ta ||| b | c
D-0\t-1.0\ta|||b|c
P-0\t-2.0000 -1.0000 -1.0000 -1.0000 -1.0000 -0.0000
H-0\t-1.25\tä
D-0\t-1.25\tä
P-0\t-2.0000 -0.5000
"""
LONG = f"0 ||| a &#124;&#124;&#124; b | c ||| LogProbability= {-6 * math.log(2):.4f} Length= 6 ||| "
SHORT = f"0 ||| ä ||| LogProbability= {-2.5 * math.log(2):.4f} Length= 2 ||| "
OTHER = f"1 ||| no ||| LogProbability= {-2 * math.log(2):.4f} Length= 2 ||| "


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    path = tmp_path / "generated"
    path.write_text(GENERATED, encoding="utf-8")
    return path


def export(generated: Path, *options: object) -> list[str]:
    output = generated.parent / "nbest"
    cli.main(["export-nbest", str(generated), "--output", str(output), *map(str, options)])
    return output.read_text(encoding="utf-8").splitlines()


def test_sentences_in_order_and_the_best_hypothesis_first(generated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [LONG + f"{-math.log(2):.6f}", SHORT + f"{-1.25 * math.log(2):.6f}", OTHER + f"{-math.log(2):.6f}"]
    assert export(generated) == expected
    assert capsys.readouterr().out.startswith("3 hypotheses\n")


def test_the_score_follows_the_penalty(generated: Path) -> None:
    total = [SHORT + f"{-2.5 * math.log(2):.6f}", LONG + f"{-6 * math.log(2):.6f}", OTHER + f"{-2 * math.log(2):.6f}"]
    assert export(generated, "--lenpen", 0) == total


def test_fields_can_be_split_again(generated: Path) -> None:
    for line in export(generated):
        number, _, features, score = line.split(" ||| ")
        assert int(number) in (0, 1)
        assert features.split()[::2] == ["LogProbability=", "Length="]
        assert float(score) == pytest.approx(float(features.split()[1]) / float(features.split()[3]), abs=1e-4)


def test_bad_input_leaves_everything_as_it_was(generated: Path) -> None:
    for arguments, message in (
        (["--output", generated], "is also to be read"),
        (["--output", generated.parent / "nbest", "--lenpen", "inf"], "between"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["export-nbest", str(generated), *map(str, arguments)])
    assert generated.read_text(encoding="utf-8") == GENERATED
    assert not (generated.parent / "nbest").exists()
