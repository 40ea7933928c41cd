"""Texts that options may hold: expressions of all kinds, layer lists, deep and long ones."""

from __future__ import annotations

from hypothesis import strategies as st

ATOMS = """1 0 -1 512 3 1000000000 10**9 1e999 0x10 1_000 2.5 1j True False None x '' 'a' b'a' ... () [] {} set() [].x
    *x __import__('os').system('true') open('x').read() (lambda:0)() [0for(x)in(y)] f'{1}' x:=1 '\\ud800' (512,3)
    (8,3,1) [(512,3)] [(512,3)]*10**9 [(512,3)]*1000000000 [True] [True]*3 ((1,2),)*2"""
SIGNS = [" * ", " + ", " - ", "**", ", ", " and ", " == ", " if ", ".", "\n", "\0", "", " * 1000 + "]
FRAMES = ["[%s]", "(%s,)", "(%s)", "{%s}", "f(%s)", "-%s", "[%s] * 1000", "{1: %s}"]
DEEP = ["[", "(", "-", "not ", "1+", "[0]*1000+", "[0]*1000,", "1**", "a.", "9", "{1:", "lambda:", "f'{", "\0"]


def longer(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    framed = st.tuples(st.sampled_from(FRAMES), st.lists(parts, max_size=4).map(", ".join))
    return st.tuples(parts, st.sampled_from(SIGNS), parts).map("".join) | framed.map(lambda pair: pair[0] % pair[1])


def repeated(deep: str, size: int, end: str) -> str:
    return deep * (size // len(deep)) + end


atoms = st.sampled_from(ATOMS.split()) | st.integers().map(str) | st.floats().map(repr) | st.text(max_size=5).map(repr)
expressions = st.recursive(atoms, longer, max_leaves=16)
long = st.builds(repeated, st.sampled_from(DEEP), st.integers(0, 2000), st.sampled_from(["", "1", "]", "1]"]))
sizes = st.integers(-1, 2048) | st.integers()
layer = st.lists(sizes, min_size=1, max_size=4).map(tuple)
blocks = st.builds("{} * {}".format, st.lists(layer, max_size=3), st.integers(-1, 30) | st.integers())
layers = st.lists(blocks, min_size=1, max_size=4).map(" + ".join)
texts = st.one_of(expressions, expressions, layers, layers, st.text(), long)
