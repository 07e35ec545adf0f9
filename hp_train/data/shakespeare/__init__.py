"""Seven plays of Shakespeare that ship with the package, so that a run needs no download.

May import errors only; never torch, never numpy. The last tenth of the bytes is held out for validation, by position.
PROVENANCE.md beside this file says where the text comes from; scripts/build_shakespeare.py rebuilds it.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from hp_train.errors import HpTrainError

TEXT_FILE = Path(__file__).with_name("shakespeare.txt.gz")
TEXT_BYTES = 911_461
TEXT_SHA256 = "4e5bd67c871f9d9054b2b4c4d784721193a0257a7e5050ee7597c9e281721600"
NUM_TRAIN_BYTES = TEXT_BYTES * 9 // 10
NUM_VAL_BYTES = TEXT_BYTES - NUM_TRAIN_BYTES


def load_text() -> bytes:
    """All of the text, training part first. Raises HpTrainError if the shipped file is missing or damaged."""
    try:
        text = gzip.decompress(TEXT_FILE.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise HpTrainError(f"{TEXT_FILE} cannot be read ({error}); install hp-train again") from error
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        raise HpTrainError(
            f"{TEXT_FILE} is not the text that was shipped (its checksum differs); install hp-train again"
        )
    return text


def load_train_text() -> bytes:
    """The first nine tenths of the bytes."""
    return load_text()[:NUM_TRAIN_BYTES]


def load_val_text() -> bytes:
    """The last tenth of the bytes, which no training sample touches."""
    return load_text()[NUM_TRAIN_BYTES:]
