"""What a table of byte pairs achieves on the shipped text, beside the validation loss of a run.

    python scripts/bigram_baseline.py [RUN_DIR]

The table counts the pairs of the training bytes, plus one for each of the 65,536 possible pairs (add-one smoothing),
and is scored on the validation bytes in nats per byte: the same bytes, in the same unit, as `val_loss` of a
byte-level run. A model that learnt no more than the table has not learnt from context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from hp_train.data import shakespeare


def bigram_nats_per_byte(train: bytes, val: bytes) -> float:
    """Mean of -log p(byte | byte before) over `val`, with p from the pairs of `train`, add-one smoothed."""
    train_pairs, val_pairs = (_pairs(text) for text in (train, val))
    counts = np.bincount(train_pairs, minlength=256 * 256).reshape(256, 256) + 1
    log_p = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_p.ravel()[val_pairs].mean())


def _pairs(text: bytes) -> np.ndarray:
    """Each byte but the last with its successor, as one number: 256 * byte + next byte."""
    ids = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    return 256 * ids[:-1] + ids[1:]


def last_val_loss(run_dir: Path) -> tuple[int, float]:
    """Step and value of the last `val_loss` in a run's metrics.jsonl."""
    with open(run_dir / "metrics.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    measured = [(row["step"], row["val_loss"]) for row in rows if row["val_loss"] is not None]
    if not measured:
        raise SystemExit(f"{run_dir} has no validation loss yet; see trainer.eval_every")
    return measured[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", nargs="?", type=Path, help="run on data=shakespeare to compare with")
    run_dir = parser.parse_args().run_dir
    baseline = bigram_nats_per_byte(shakespeare.load_train_text(), shakespeare.load_val_text())
    print(f"bigram table   {baseline:.4f} nats per byte")
    if run_dir is not None:
        step, loss = last_val_loss(run_dir)
        print(f"run, step {step:<5}{loss:.4f} nats per byte, {baseline - loss:.4f} below the table  ({run_dir})")


if __name__ == "__main__":
    main()
