"""A record of an experiment's settings in its folder of results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from fairseq_plugins.common.files import replacing


def refuse_other_settings(record: Path, settings: Mapping[str, object], made: Iterable[Path]) -> None:
    """Record an experiment's settings; refuse them if earlier results in the folder have other settings.

    Args:
        record: file that records the settings.
        settings: values of the settings, by name.
        made: result files of earlier calls; if there are none, any settings are accepted.

    Raises:
        ValueError: the record has other settings.
    """
    now = {name: str(value) for name, value in settings.items()}
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() and any(made) else now
    for name, value in now.items():
        if (other := before.get(name)) != value:
            raise ValueError(f"{record.parent} has {name} {other}, not {value}: choose another folder")
    with replacing(record) as beside:
        beside.write_text(json.dumps(now), encoding="utf-8")
