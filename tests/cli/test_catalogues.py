"""gettext catalogues: training pairs, languages, and empty entries to fill."""

from __future__ import annotations

import re
from pathlib import Path

import polib
import pytest

from fairseq_plugins.cli import catalogues
from fairseq_plugins.cli.own_data.cleaning import languages_of, pair_up, read_pairs
from tests.cli.conftest import tool

HEADER = """# Spanish translations.
msgid ""
msgstr ""
"Language: {}\\n"
"Content-Type: text/plain; charset={}\\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\\n"

"""
ENTRIES = """#: main.c:1
msgid "Open the dog."
msgstr "Abre el perro."

#, fuzzy
#| msgid "Close the dog."
msgid "Close the man."
msgstr "Cierra el perro."

#, c-format
msgid "%d dog and a boat"
msgid_plural "%d dogs and a boat"
msgstr[0] "%d perro y un bote"
msgstr[1] "%d perros y un bote"

#. A comment.
#: main.c:9
#, python-format
msgid "See <b>%(name)s</b>."
msgstr ""

msgctxt "menu"
msgid ""
"  First line\\n"
"\\n"
"Second of {count}\\n"
msgstr ""

msgctxt "tool"
msgid "two\\nlines"
msgstr "dos\\nlíneas"

#, c-format
msgid "%s horse"
msgid_plural "%s horses"
msgstr[0] ""
msgstr[1] "%s caballos"

#~ msgid "Gone."
#~ msgstr "Ido."

#~ msgid "Gone, too."
#~ msgstr ""
"""
CATALOGUE = HEADER.format("es", "UTF-8") + ENTRIES
PAIRS = [
    ("Open the dog.", "Abre el perro."),
    ("%d dog and a boat", "%d perro y un bote"),
    ("%d dogs and a boat", "%d perros y un bote"),
    ("two lines", "dos líneas"),
]


def test_pairs_of_a_folder(tmp_path: Path) -> None:
    """A folder of catalogues gives pairs from all subfolders, without fuzzy, obsolete and untranslated entries."""
    (tmp_path / "po" / "library").mkdir(parents=True)
    (tmp_path / "po" / "library" / "a.po").write_text(CATALOGUE, encoding="utf-8")
    (tmp_path / "po" / "b.PO").write_text(HEADER.format("es", "iso-8859-1") + ENTRIES, encoding="latin-1")
    for source, times in ((tmp_path / "po", 2), (tmp_path / "po" / "b.PO", 1)):
        languages = languages_of(source, source, None, None)
        assert languages == ("en", "es")
        assert list(read_pairs(pair_up(source, source, languages), languages)) == PAIRS * times


@pytest.mark.parametrize(("header", "language"), [("es", "es"), ("pt_BR", "pt-BR"), ("zh_Hans", "zh-Hans")])
def test_languages_are_those_of_the_header(header: str, language: str, tmp_path: Path) -> None:
    path = tmp_path / "a.po"
    path.write_text(CATALOGUE.replace("Language: es", f"Language: {header}"), encoding="utf-8")
    assert languages_of(path, path, None, None) == ("en", language)
    assert languages_of(tmp_path, tmp_path, "fr", None) == ("fr", language)
    assert languages_of(path, path, None, "eo") == ("en", "eo")
    with pytest.raises(ValueError, match=f"--source-lang {language}"):
        languages_of(path, path, language, "en")
    path.write_text(CATALOGUE.replace("Language: es", "Language: "), encoding="utf-8")
    with pytest.raises(ValueError, match=r"--target-lang: .*a\.po"):
        languages_of(path, path, None, None)


def filled(path: Path) -> tuple[str, list[catalogues.Gap]]:
    """Fill each empty entry with its source in capitals, except for {braces}."""
    catalogue = catalogues.load(path)
    gaps = catalogues.gaps(catalogue)
    lines = [line for gap in gaps for line in gap.lines()]
    assert all(line == line.strip() != "" for line in lines)
    for gap in gaps:
        gap.fill({line: f" {line.upper().replace('{COUNT}', '{count}')} " for line in lines})
    return catalogues.in_utf8(catalogue).decode(), gaps


def test_blank_entries_and_entries_without_a_translation_stay_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.po"
    entries = 'msgid "None"\nmsgstr ""\n\nmsgctxt "c"\nmsgid ""\nmsgstr ""\n\nmsgid " "\nmsgstr ""\n'
    path.write_text(HEADER.format("es", "UTF-8") + entries)
    catalogue = catalogues.load(path)
    (gap,) = catalogues.gaps(catalogue)
    gap.fill({"None": ""})
    assert catalogues.in_utf8(catalogue).decode() == path.read_text()


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1"])
def test_empty_entries_are_filled(encoding: str, tmp_path: Path) -> None:
    """Other entries stay; each line is translated alone, and keeps the white space around it; UTF-8 is written."""
    path = tmp_path / "a.po"
    path.write_text(HEADER.format("es", encoding.upper()) + ENTRIES, encoding=encoding)
    expected = CATALOGUE
    for before, after in (
        ('#, python-format\nmsgid "See', '#, fuzzy, python-format\nmsgid "See'),
        ('</b>."\nmsgstr ""\n', '</b>."\nmsgstr "SEE <B>%(NAME)S</B>."\n'),
        ('msgctxt "menu"', '#, fuzzy\nmsgctxt "menu"'),
        ('{count}\\n"\nmsgstr ""\n', '{count}\\n"\nmsgstr ""\n"  FIRST LINE\\n"\n"\\n"\n"SECOND OF {count}\\n"\n'),
        ('#, c-format\nmsgid "%s horse"', '#, fuzzy, c-format\nmsgid "%s horse"'),
        ('msgstr[0] ""', 'msgstr[0] "%S HORSE"'),
        ('msgid "two\\nlines"', 'msgid ""\n"two\\n"\n"lines"'),  # polib's layout
        ('msgstr "dos\\nlíneas"', 'msgstr ""\n"dos\\n"\n"líneas"'),
    ):
        assert expected.count(before) == 1
        expected = expected.replace(before, after)
    text, gaps = filled(path)
    assert text == expected
    # The translation in capitals has other tags and another format specification.
    assert catalogues.report(path, gaps).splitlines()[1:] == [
        "  line 23: lost <b>, lost %(name)s, lost </b>, added <B>, added %(NAME)S, added </B>",
        "  line 40: lost %s, added %S",
    ]
    path.write_text(text, encoding="utf-8")
    assert filled(path) == (text, []), "no empty entry is left"


def test_languages_with_one_form_or_more(tmp_path: Path) -> None:
    """Chinese has one plural form for all numbers; the first form of Polish is the singular."""
    entry = 'msgid "One."\nmsgid_plural "Many."\n'
    for forms, expected in ((1, ["MANY."]), (3, ["ONE.", "MANY.", "MANY."])):
        (tmp_path / "a.po").write_text(entry + "".join(f'msgstr[{form}] ""\n' for form in range(forms)))
        (filled_entry,) = polib.pofile(filled(tmp_path / "a.po")[0])
        assert filled_entry.msgstr_plural == dict(enumerate(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100% of 5 %, %% or % of, 100%ige, %%s", []),
        (
            "%(name)s %(n)05.2f, %s: %d (%1$s) %-8.3f %ld %zu.",
            ["%(name)s", "%(n)05.2f", "%s", "%d", "%1$s", "%-8.3f", "%ld", "%zu"],
        ),
        ("{} {name} {0:>10} {x!r} { 'a': 1 }", ["{}", "{name}", "{0:>10}", "{x!r}"]),
        ("``a b``, `c`, :ref:`my text <a-b>`, :py:class:`~a.B`", ["``a b``", ":ref:`<a-b>`", ":py:class:`~a.B`"]),
        (
            "`Page <https://a.org/b>`_, 见https://b.org/c_(d)。 http://c.org/,",
            ["<https://a.org/b>", "https://b.org/c_", "http://c.org/"],
        ),
        ("<b class='x'>a</b> 1 < 2 > 0 <br/>", ["<b class='x'>", "</b>", "<br/>"]),
        ("|version|, |a b|, a | b | c, x|y|z", ["|version|", "|a b|"]),
    ],
)
def test_placeholders(text: str, expected: list[str]) -> None:
    assert list(catalogues.placeholders(text).elements()) == expected


@pytest.mark.parametrize("content", [b"Some text.\n", b'msgid "a"\nmsgstr "\xff"\n'])
def test_the_error_names_a_file_that_is_not_a_catalogue(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.po").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.po"):
        list(read_pairs([(tmp_path / "a.po",) * 2], ("en", "es")))


def test_catalogues_of_several_languages_are_refused(tmp_path: Path) -> None:
    """Translators of one language may name different regions; a catalogue without translations is not compared."""
    for name, language, entries in (
        ("a", "es_AR", ENTRIES),
        ("b", "es@x", ENTRIES),
        ("c", "en", ""),
        ("d", "de", ENTRIES),
    ):
        (tmp_path / f"{name}.po").write_text(HEADER.format(language, "UTF-8") + entries, encoding="utf-8")
    files = pair_up(tmp_path, tmp_path, ("en", "es"))
    assert list(read_pairs(files[:3], ("en", "es"))) == PAIRS * 2
    with pytest.raises(ValueError, match=r"d\.po: .* de, not es"):
        list(read_pairs(files, ("en", "es")))


def test_an_entry_with_a_plural_source_and_one_translation(tmp_path: Path) -> None:
    (tmp_path / "a.po").write_text('msgid "a dog"\nmsgid_plural "dogs"\nmsgstr "perro"\n')
    assert list(read_pairs([(tmp_path / "a.po",) * 2], ("en", "es"))) == [("a dog", "perro")]


def test_a_model_fills_a_catalogue(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Entries are translated like lines of a text, and warnings name lines of the catalogue."""
    learned = HEADER.format("de", "UTF-8") + "\n".join(
        f'msgid "A dog and {n} boats."\nmsgstr "Ein Hund und {n} Boote."\n' for n in range(300)
    )
    (tmp_path / "all.po").write_text(learned, encoding="utf-8")
    tiny = "--encoder-layers '[(16, 3)]' --decoder-layers '[(16, 3)]' --max-epoch 1 --num-workers 0"
    call = ["own-data", tmp_path / "all.po", tmp_path / "out", "--arch", "convs2s_tiny"]
    tool(*call, "--train", f"{tiny} --max-source-positions 64 --max-target-positions 64")

    def translated(name: str) -> tuple[str, str]:
        capfdbinary.readouterr()
        tool(*call, "--translate", tmp_path / name)
        output, errors = capfdbinary.readouterr()
        return output.decode(), errors.decode()

    (tmp_path / "some.po").write_text(f'{CATALOGUE}\nmsgid "{"A boat. " * 40}"\nmsgstr ""\n', encoding="utf-8")
    lines = ["See <b>%(name)s</b>.", "First line", "Second of {count}", "%s horse", ("A boat. " * 40).strip()]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    expected = [line.strip() for line in translated("lines")[0].removesuffix("\n").split("\n")]
    text, told = translated("some.po")
    see, menu, horse, long = (entry for entry in polib.pofile(text) if entry.fuzzy and "Close" not in entry.msgid)
    found = [see.msgstr, *menu.msgstr.split("\n"), horse.msgstr_plural[0], long.msgstr.rstrip(" ")]
    assert found == [expected[0], f"  {expected[1]}", "", expected[2], "", *expected[3:]]
    assert re.search(r"line 52 has \d+ tokens", told)
    assert "\n  line 23: lost <b>, " in told
