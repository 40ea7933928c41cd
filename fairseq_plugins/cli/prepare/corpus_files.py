"""The files that a corpus is made of: what they are, where they come from, and how they come here."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_plugins.cli.bar import bar
from fairseq_plugins.cli.prepare.download import digest_of, download
from fairseq_plugins.common.files import refuse_pipe, replacing


@dataclass(frozen=True)
class File:
    """One file, and where it comes from.

    Attributes:
        path: below the folder.
        url: the file itself, or a tar archive that holds it under this path; None for what cannot be downloaded.
        checksum: of what is downloaded, or of a text that may change, ``sha256:...`` or ``md5:...``.
        folder: by default that of the originals; a project may move, so it is not recorded.
    """

    path: str
    url: str | None = None
    checksum: str | None = None
    folder: str = field(default="", repr=False)

    def place(self, orig: Path = Path()) -> Path:
        """Where it is, gzipped or not, under its own name or that without or with ``.gz``."""
        own = orig / self.folder / self.path
        other = own.with_suffix("") if own.suffix == ".gz" else own.with_name(f"{own.name}.gz")
        return other if other.is_file() and not own.exists() else own


Texts = tuple[tuple[File, File], ...]  # source and target of each


def text(path: str, languages: tuple[str, str], url: str | None = None, checksum: str | None = None) -> Texts:
    """A text whose two files differ in the language, ``{}`` in path and URL."""
    source, target = (File(path.format(name), url and url.format(name), checksum) for name in languages)
    return ((source, target),)


def fetch(files: Sequence[File], orig: Path, wanted: Container[File], terms: str = "") -> None:
    """Download and unpack what is not in ``orig``.

    Args:
        files: all of a corpus, by which archives have their names.
        orig: the folder.
        wanted: those that are needed.
        terms: where to get what cannot be downloaded.

    Raises:
        ValueError: a file cannot be downloaded, is not the one that was expected, or is a pipe, or an archive does not
            hold it.
        OSError: the network fails.
    """
    archives: dict[tuple[str, str | None], list[str]] = {}
    for file in files:
        place = file.place(orig)
        refuse_pipe(place)
        if file not in wanted or place.exists():
            continue
        if file.url is None:
            raise ValueError(f"{place} is missing. {terms}".rstrip())
        archives.setdefault((file.url, file.checksum), []).append(file.path)
    for (url, checksum), paths in archives.items():
        if Path(paths[0]).name == Path(url).name:
            download(url, orig / paths[0], checksum)
        else:
            archive = orig / archive_name(url, files)
            download(url, archive, checksum)
            unpack(archive, orig, paths)


def archive_name(url: str, files: Sequence[File]) -> str:
    """``test.tgz``; ``wmt15-test.tgz`` where another folder of the network has one too."""
    name, folder = Path(url).name, Path(url).parent.name
    alike = {file.url for file in files if file.url is not None and Path(file.url).name == name}
    return f"{folder}-{name}" if len(alike) > 1 else name


def unpack(archive: Path, folder: Path, paths: Iterable[str]) -> None:
    """Take some files out of a tar archive.

    Raises:
        ValueError: it does not hold one, or is broken.
    """
    missing = dict.fromkeys(paths)  # in their order
    try:
        with tarfile.open(archive) as tar:
            for member in bar(tar, desc=f"unpack {archive.name}", unit=" files"):
                name = member.name.removeprefix("./")
                content = tar.extractfile(member) if name in missing else None
                if content is not None:
                    with replacing(folder / name) as beside, beside.open("wb") as file:
                        shutil.copyfileobj(content, file)
                    del missing[name]
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive}: {error}; if it is something else, remove it to download it anew") from error
    if missing:
        raise ValueError(f"{archive} does not hold {', '.join(missing)}; remove it to download it anew")


def sums(files: Iterable[File], orig: Path) -> dict[str, str]:
    """What tells the texts that are there, gzipped or not, from others of these names, by path.

    A sum where nobody has published one; of the others, which are many and large, the size.
    """
    found = {}
    for file in dict.fromkeys(files):
        place = file.place(orig)
        refuse_pipe(place)
        if place.exists() and file.checksum is not None:
            found[file.path] = f"{size_of_text(place)} bytes"
        elif place.exists():
            with gzip.open(place) if place.suffix == ".gz" else place.open("rb") as content:
                try:
                    found[file.path] = f"sha256:{digest_of(content, 'sha256')}"
                except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                    raise ValueError(f"{place}: {error}") from error
    return found


def size_of_text(path: Path) -> int:
    """Its bytes, modulo 2³²: so many the end of a gzipped file tells."""
    size = path.stat().st_size
    if path.suffix != ".gz":
        return size % 2**32
    with path.open("rb") as file:
        file.seek(max(size - 4, 0))
        return int.from_bytes(file.read(), "little")
