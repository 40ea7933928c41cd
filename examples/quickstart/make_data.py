#!/usr/bin/env python3
"""Write the demo's English and German text: numbers, dates, times, amounts, measures, countries and languages.

``make_data.py OUT`` writes ``{train,valid,test}.{en,de}`` to OUT.  The sentences are short; their words come from Babel
(Unicode's CLDR) and num2words.  Every source sentence is unique and has one correct translation, so a perfect model
scores 100 BLEU.  Training, validation and test text share no source sentence.  The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from datetime import date, time, timedelta
from pathlib import Path

from babel import Locale
from babel.dates import format_date, format_time
from babel.lists import format_list
from babel.numbers import format_currency
from babel.units import format_unit
from num2words import num2words

SIZES = {"train": 22000, "valid": 500, "test": 1000}
LANGUAGES = ("en", "de")
NOT_COUNTRIES = {"EU", "EZ", "QO", "UN", "XA", "XB", "ZZ"}
CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "NOK", "CAD", "AUD", "INR", "CNY")
UNITS = (
    "area-square-kilometer",
    "duration-day",
    "duration-hour",
    "duration-minute",
    "duration-week",
    "duration-year",
    "length-centimeter",
    "length-kilometer",
    "length-meter",
    "length-mile",
    "mass-gram",
    "mass-kilogram",
    "speed-kilometer-per-hour",
    "temperature-celsius",
    "volume-liter",
)

Pair = tuple[str, str]


def names(field: str) -> list[Pair]:
    """Return CLDR's English and German names of countries or languages with two-letter codes.

    Names with parentheses and names of more than two words are left out.
    """
    english, german = (getattr(Locale(language), field) for language in LANGUAGES)
    codes = sorted(code for code in english if len(code) == 2 and code in german and code not in NOT_COUNTRIES)
    pairs = [(english[code], german[code]) for code in codes]
    return [pair for pair in pairs if not any("(" in name or name.count(" ") > 1 for name in pair)]


COUNTRY_NAMES, LANGUAGE_NAMES = names("territories"), names("languages")


def both(function: Callable[[str], str]) -> Pair:
    """Return the results of ``function`` for English and German."""
    english, german = (function(language) for language in LANGUAGES)
    return english, german


def in_words(value: float, **options: str) -> Pair:
    # num2words writes a comma after "thousand"; English text rarely has this comma.
    english, german = both(lambda language: num2words(value, lang=language, **options))
    return english.replace(",", ""), german


def large(rng: random.Random, digits: int) -> int:
    """Return a random integer of 2 to ``digits`` digits; all lengths are equally likely."""
    length = rng.randint(2, digits)
    return rng.randrange(10 ** (length - 1), 10**length)


def fill(rng: random.Random, frames: list[Pair], *phrases: Pair) -> Pair:
    """Insert pairs of phrases into a random pair of frames (an English and a German sentence with gaps)."""
    english, german = rng.choice(frames)
    return english.format(*(phrase[0] for phrase in phrases)), german.format(*(phrase[1] for phrase in phrases))


def cardinal(rng: random.Random) -> Pair:
    frames = [
        ("The number is {}.", "Die Zahl lautet {}."),
        ("She counted from {} to one million.", "Sie zählte von {} bis eine Million."),
        ("Is the answer {}?", "Lautet die Antwort {}?"),
    ]
    return fill(rng, frames, in_words(large(rng, 6)))


def sums(rng: random.Random) -> Pair:
    frames = [("Multiply {} by {}.", "Multipliziere {} mit {}."), ("Subtract {} from {}.", "Subtrahiere {} von {}.")]
    return fill(rng, frames, in_words(large(rng, 4)), in_words(large(rng, 4)))


def ordinal(rng: random.Random) -> Pair:
    # The German sentences have nouns of all three genders, one of them in the dative: "zum vierunddreißigsten Mal".
    frames = [
        ("Today is the {} day.", "Heute ist der {} Tag."),
        ("Read the {} page.", "Lies die {} Seite."),
        ("He won for the {} time.", "Er gewann zum {}n Mal."),
        ("The {} house is empty.", "Das {} Haus ist leer."),
    ]
    return fill(rng, frames, in_words(large(rng, 4), to="ordinal"))


def year(rng: random.Random) -> Pair:
    frames = [
        ("The bridge was built in {}.", "Die Brücke wurde im Jahr {} gebaut."),
        ("She was born in {}.", "Sie wurde im Jahr {} geboren."),
        ("It happened between {} and {}.", "Es geschah zwischen {} und {}."),
    ]
    first = rng.randint(1100, 2020)
    return fill(rng, frames, in_words(first, to="year"), in_words(rng.randint(first + 1, 2025), to="year"))


def calendar(rng: random.Random) -> Pair:
    day = date(1900, 1, 1) + timedelta(days=rng.randrange(125 * 365))
    long = [
        ("The school opened on {}.", "Die Schule wurde am {} eröffnet."),
        ("He was born on {}.", "Er wurde am {} geboren."),
    ]
    full = [("Date: {}.", "Datum: {}.")]
    frames, style = rng.choice([(long, "long"), (full, "full")])
    return fill(rng, frames, both(lambda language: format_date(day, style, locale=language)))


def clock(rng: random.Random) -> Pair:
    frames = [
        ("The train leaves at {}.", "Der Zug fährt um {} Uhr ab."),
        ("The film starts at {}.", "Der Film beginnt um {} Uhr."),
        ("Can you come at {}?", "Kannst du um {} Uhr kommen?"),
    ]
    moment = time(rng.randrange(24), rng.randrange(60))
    english, german = both(lambda language: format_time(moment, "short", locale=language))
    # CLDR writes a narrow no-break space before AM and PM.
    return fill(rng, frames, (english.replace("\u202f", " "), german))


def money(rng: random.Random) -> Pair:
    frames = [("The ticket costs {}.", "Die Karte kostet {}."), ("We paid {}.", "Wir haben {} bezahlt.")]
    currency = rng.choice(CURRENCIES)
    amount = large(rng, 4) + rng.randint(1, 99) / 100
    return fill(rng, frames, both(lambda lang: format_currency(amount, currency, locale=lang, format_type="name")))


def money_in_words(rng: random.Random) -> Pair:
    frames = [("The bill comes to {}.", "Die Rechnung beträgt {}."), ("She has {}.", "Sie hat {}.")]
    amount = large(rng, 4) + rng.randint(1, 99) / 100
    currency = rng.choice(("EUR", "USD", "GBP"))
    english, german = (
        num2words(amount, lang=language, to="currency", currency=currency, separator=separator)
        for language, separator in (("en", " and"), ("de", " und"))
    )
    return fill(rng, frames, (english.replace(",", ""), german))


def measure(rng: random.Random) -> Pair:
    frames = [("The result is {}.", "Das Ergebnis ist {}."), ("We measured {}.", "Wir haben {} gemessen.")]
    unit, value = rng.choice(UNITS), large(rng, 4) / rng.choice((1, 10))
    return fill(rng, frames, both(lambda language: format_unit(value, unit, "long", locale=language)))


def country(rng: random.Random) -> Pair:
    # The country names follow a label such as "Länder:", because within a German sentence some of the names would need
    # an article.
    frames = [("Countries: {}.", "Länder: {}."), ("Please choose: {}.", "Bitte wählen Sie: {}.")]
    return fill(rng, frames, listing(COUNTRY_NAMES, rng.randint(2, 3), rng))


def language(rng: random.Random) -> Pair:
    frames = [("The book is available in {}.", "Das Buch gibt es auf {}."), ("Say it in {}!", "Sag es auf {}!")]
    return fill(rng, frames, listing(LANGUAGE_NAMES, rng.randint(1, 3), rng))


def listing(pairs: list[Pair], count: int, rng: random.Random) -> Pair:
    english, german = zip(*rng.sample(pairs, count), strict=True)
    return format_list(english, locale="en"), format_list(german, locale="de")


KINDS = (cardinal, sums, ordinal, year, calendar, clock, money, money_in_words, measure, country, language)


def generate(count: int, seed: int) -> list[Pair]:
    """Generate ``count`` pairs with different sources; the kinds of sentences alternate."""
    rng = random.Random(seed)
    translations: dict[str, str] = {}
    turn = 0
    while len(translations) < count:
        source, target = KINDS[turn % len(KINDS)](rng)
        turn += 1
        if translations.setdefault(source, target) != target:
            raise ValueError(f"two translations of {source!r}: {translations[source]!r} and {target!r}")
    pairs = list(translations.items())
    rng.shuffle(pairs)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the text")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generator (default: %(default)s)")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    pairs = generate(sum(SIZES.values()), args.seed)
    for split, size in SIZES.items():
        part, pairs = pairs[:size], pairs[size:]
        for index, name in enumerate(LANGUAGES):
            (args.out / f"{split}.{name}").write_text("".join(pair[index] + "\n" for pair in part), encoding="utf-8")
        print(f"{args.out / split}.{{en,de}}: {size} pairs")


if __name__ == "__main__":
    main()
