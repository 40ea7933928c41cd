"""``--bpe sentencepiece`` gives text back as its model does."""

from __future__ import annotations

from typing import Any

from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE


def decode_pieces_with_their_model() -> None:
    """fairseq joins pieces by hand: a character in bytes stays ``<0xC3> <0xA4>``, and a line loses its outer spaces.

    A line feed that a model writes in bytes becomes a space, for each translation is one line.
    """
    if joins_by_hand():

        def decode(self: Any, x: str) -> str:
            return str(self.sp.decode(x.split(" "))).replace("\n", " ")

        SentencepieceBPE.decode = decode


def joins_by_hand() -> bool:
    """Probe: whether a line is decoded without a model."""
    try:
        return bool(SentencepieceBPE.decode(None, "\u2581a <0x41>") == "a<0x41>")
    except AttributeError:
        return False
