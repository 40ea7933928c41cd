"""``examples/documentation``: from catalogues to a model by the two commands of its page."""

from __future__ import annotations

from pathlib import Path

from tests.commands import ROOT, python

SPLIT = ROOT / "examples" / "documentation" / "split.py"


def test_documents_are_in_one_part_and_stay_there(tmp_path: Path) -> None:
    for number in range(30):
        path = tmp_path / "po" / f"{number % 3}" / f"{number}.po"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}")
    found = {}
    for out, more in (("one", ()), ("two", ("0/new.po", "new.po"))):
        for name in more:
            (tmp_path / "po" / name).write_text(name)
        result = python(SPLIT, tmp_path / "po", tmp_path / out, "--every", 5)
        assert result.returncode == 0, result.stderr
        copies = list((tmp_path / out).rglob("*.po"))
        found[out] = {path.read_text(): path.relative_to(tmp_path / out).parts[0] for path in copies}
        assert len(copies) == 30 + len(more)
        assert set(found[out].values()) == {"train", "valid", "test"}
    assert found["one"].items() <= found["two"].items()


def test_a_part_without_documents_and_an_old_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "po").mkdir()
    (tmp_path / "po" / "a.po").write_text("")
    result = python(SPLIT, tmp_path / "po", tmp_path / "out")
    assert result.returncode == 1
    assert "--every" in result.stderr
    assert not (tmp_path / "out").exists()
    for number in range(30):
        (tmp_path / "po" / f"{number}.po").write_text("")
    result = python(SPLIT, tmp_path / "po", tmp_path, "--every", 5)
    assert result.returncode == 1
    assert f"{tmp_path} already exists" in result.stderr
