"""How a model leaves Python: `torch.export` takes it whole, and TorchScript is refused.

    with torch.no_grad():
        program = torch.export.export(model, (src_tokens, None, prev_output_tokens), strict=False)

TorchScript takes neither the keyword arguments that fairseq passes nor what replaces loops and layouts here, and its
own errors name some inner line.
"""

from __future__ import annotations

from typing import NoReturn

import torch

__all__ = ["NoTorchScript"]


class NoTorchScript:
    """A part of a model, which says what to do instead where torch or fairseq would turn it into TorchScript."""

    def refuse_tracing(self) -> None:
        """For the start of `forward`.

        Raises:
            NotImplementedError: the call is traced, as `torch.jit.trace` and torch's older exporter to ONNX do.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            self._refuse()

    def _refuse(self, **unused: object) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} cannot become TorchScript, nor ONNX by way of it: "
            "use torch.export.export(model, (src_tokens, None, prev_output_tokens), strict=False) under torch.no_grad()"
        )

    __prepare_scriptable__ = _refuse  # what `torch.jit.script` asks for first
    prepare_for_onnx_export_ = _refuse  # what fairseq's scripts ask for before they export
