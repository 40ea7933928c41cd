#!/usr/bin/env python3
"""Split gettext catalogues into training, validation and test parts, by file.

``split.py CATALOGUES OUT`` copies each ``.po`` of a folder and its subfolders to ``OUT/train``, ``OUT/valid`` or
``OUT/test``.  The paragraphs of one document share names and sentences.  Therefore, all paragraphs of a document belong
to one part: if some were in the training part and others in the test part, the test part would not show how well a
model translates a new document.  The part of a document depends only on its path in the folder, and stays the same when
other documents are added.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zlib
from pathlib import Path

HELD_OUT = {0: "valid", 1: "test"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("catalogues", type=Path, help="folder of the catalogues of one language")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument(
        "--every",
        type=int,
        default=40,
        metavar="N",
        help="put one of N files into the validation part, and another into the test part (default: 40)",
    )
    args = parser.parse_args()
    if args.every < 3:
        parser.error(f"--every must be at least 3, got {args.every}")
    if not args.catalogues.is_dir():
        sys.exit(f"{args.catalogues} is not a folder: give the folder of the catalogues")
    if args.catalogues.resolve() in (args.out.resolve(), *args.out.resolve().parents):
        sys.exit(f"{args.out} is in {args.catalogues}, where a later call would read the copies: choose another OUT")
    files = sorted(path for path in args.catalogues.rglob("*.po") if path.is_file())
    if not files:
        sys.exit(f"{args.catalogues} contains no catalogues (*.po): choose another folder")
    parts = {
        path: HELD_OUT.get(zlib.crc32(bytes(path.relative_to(args.catalogues))) % args.every, "train") for path in files
    }
    if missing := " or ".join(sorted({"train", *HELD_OUT.values()} - set(parts.values()))):
        sys.exit(
            f"--every {args.every}: none of the {len(files)} catalogues in {args.catalogues} is in the {missing} part; "
            "try another N"
        )
    if args.out.exists():
        sys.exit(f"{args.out} already exists: choose another OUT")
    for path, part in parts.items():
        copy = args.out / part / path.relative_to(args.catalogues)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for part in ("train", "valid", "test"):
        print(f"{list(parts.values()).count(part)} catalogues in {args.out / part}")


if __name__ == "__main__":
    main()
