"""Random texts of options: expressions, layer lists, and deep or long texts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

T = TypeVar("T")

ATOMS = """1 0 -1 512 3 1000000000 10**9 1e999 0x10 1_000 2.5 1j True False None x '' 'a' b'a' ... () [] {} set() [].x
    *x __import__('os').system('true') open('x').read() (lambda:0)() [0for(x)in(y)] f'{1}' x:=1 '\\ud800' (512,3)
    (8,3,1) [(512,3)] [(512,3)]*10**9 [(512,3)]*1000000000 [True] [True]*3 ((1,2),)*2"""
SIGNS = [" * ", " + ", " - ", "**", ", ", " and ", " == ", " if ", ".", "\n", "\0", "", " * 1000 + "]
FRAMES = ["[%s]", "(%s,)", "(%s)", "{%s}", "f(%s)", "-%s", "[%s] * 1000", "{1: %s}"]
DEEP = ["[", "(", "-", "not ", "1+", "[0]*1000+", "[0]*1000,", "1**", "a.", "9", "{1:", "lambda:", "f'{", "\0"]


def several(random: Random, part: Callable[[Random], T], least: int, most: int) -> list[T]:
    return [part(random) for _ in range(random.randint(least, most))]


def integer(random: Random) -> int:
    return random.choice([-1, 1]) * random.getrandbits(random.choice([1, 4, 8, 16, 32, 70]))


def number(random: Random) -> float:
    return random.choice([*struct.unpack("d", random.randbytes(8)), random.gauss(0, 100), 0.0, float("nan")])


def characters(random: Random) -> str:
    size = random.choice([0x80, 0x300, 0x110000])
    return "".join(several(random, lambda random: chr(random.randrange(size)), 0, 10))


def atom(random: Random) -> str:
    if random.random() < 0.6:
        return random.choice(ATOMS.split())
    return repr(random.choice([integer, number, characters])(random))


def expression(random: Random, depth: int = 4) -> str:
    if not depth or random.random() < 0.4:
        return atom(random)
    inner = partial(expression, depth=depth - 1)
    if random.random() < 0.5:
        return inner(random) + random.choice(SIGNS) + inner(random)
    return random.choice(FRAMES) % ", ".join(several(random, inner, 0, 4))


def repeated(deep: str, size: int, end: str) -> str:
    return deep * (size // len(deep)) + end


def long(random: Random) -> str:
    return repeated(random.choice(DEEP), random.randint(0, 2000), random.choice(["", "1", "]", "1]"]))


def size(random: Random) -> int:
    return random.randint(-1, 2048) if random.random() < 0.9 else integer(random)


def layer(random: Random) -> tuple[int, ...]:
    return tuple(size(random) for _ in range(random.choice([1, 2, 2, 2, 3, 4])))


def block(random: Random) -> str:
    times = random.randint(-1, 30) if random.random() < 0.9 else integer(random)
    return f"{several(random, layer, 0, 3)} * {times}"


def layers(random: Random) -> str:
    return " + ".join(several(random, block, 1, 4))


def text(random: Random) -> str:
    return random.choice([expression, expression, layers, layers, characters, long])(random)
