"""`hp-train sample RUN_DIR --prompt TEXT`: let a run's model go on with a text. No torch until all is checked."""

from __future__ import annotations

import argparse
import math

from hp_train.commands.arguments import add_run_dir, whole_number
from hp_train.config.schema import ModelSection
from hp_train.errors import ConfigError, ExitCode
from hp_train.launch.find_run import find_run

MAX_TOKENS = 200
MAX_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_dir(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to go on from")
    parser.add_argument(
        "--max-tokens", default=str(MAX_TOKENS), metavar="N", help=f"tokens to make at most ({MAX_TOKENS})"
    )
    parser.add_argument(
        "--temperature", default="0.8", metavar="T", help="above 1 wilder, 0 always the likeliest token (0.8)"
    )
    parser.add_argument("--seed", default="0", metavar="S", help="another one gives another text (0)")
    parser.add_argument("--step", metavar="N", help="the checkpoint of this step (the newest)")
    parser.add_argument("--tokenizer", metavar="byte|FILE.json", help="in place of the tokenizer of the run's data")


def run(args: argparse.Namespace) -> int:
    """Check, generate, print as the text comes. Raises ConfigError."""
    faults = []
    max_tokens, fault = whole_number("--max-tokens", args.max_tokens, 1)
    faults += fault
    seed, fault = whole_number("--seed", args.seed, 0)
    faults += fault or ([f"--seed {args.seed} is too large; use 0 to {MAX_SEED}"] if seed > MAX_SEED else [])
    step = None
    if args.step is not None:
        step, fault = whole_number("--step", args.step, 1)
        faults += fault
    temperature = _temperature(args.temperature)
    if temperature is None:
        faults.append(f"--temperature {args.temperature} is not a number; use 0 or more")
    if not args.prompt:
        faults.append("--prompt is empty; give some text to go on from")
    if faults:
        raise ConfigError(*faults)
    _generate(args, max_tokens, temperature, seed, step)
    return ExitCode.DONE


def _generate(args: argparse.Namespace, max_tokens: int, temperature: float, seed: int, step: int | None) -> None:
    from hp_train.data.tokenizer import open_tokenizer
    from hp_train.pretrained.run_config import newest_config
    from hp_train.pretrained.run_tokenizer import tokenizer_of_run

    run_dir = find_run(args.run_dir)
    config = newest_config(run_dir)
    known = tokenizer_of_run(config, args.tokenizer)
    if known.name is None:
        raise ConfigError(
            f"run {run_dir} was trained on data={config.data.name}, which has no text; use --tokenizer byte|FILE.json"
        )
    tokenizer = open_tokenizer(known.name, "the run's tokenizer")
    prompt = tokenizer.encode_prompt(args.prompt, special_tokens=config.model.pretrained is not None)
    _check_prompt(prompt, max_tokens, config.model)
    import torch  # loaded here, when nothing is left to refuse

    from hp_train.generation.model import load_model
    from hp_train.generation.sampler import generate, text_pieces
    from hp_train.pretrained.stored_weights import StoredWeights

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda" and config.trainer.precision != "fp32"
    with StoredWeights(run_dir, config.model, step) as weights:
        model = load_model(weights, config.model, device, torch.bfloat16 if half else torch.float32)
    print(args.prompt, end="", flush=True)
    eos_id = known.special_ids["eos_token_id"]
    ids = generate(
        model, prompt, max_tokens, temperature=temperature, seed=seed,
        eos_id=eos_id if isinstance(eos_id, int) else None,
    )  # fmt: skip
    for piece in text_pieces(ids, tokenizer.decode, prompt):
        print(piece, end="", flush=True)
    print()


def _check_prompt(prompt: list[int], max_tokens: int, model: ModelSection) -> None:
    if not prompt:
        raise ConfigError("--prompt has no tokens; give some text to go on from")
    if max(prompt) >= model.vocab_size:
        raise ConfigError(
            f"--prompt has token id {max(prompt)}, beyond model.vocab_size={model.vocab_size}; is the tokenizer the "
            "run's?"
        )
    room = model.max_seq_len - len(prompt)
    if room < 1:
        raise ConfigError(f"--prompt has {len(prompt)} tokens and model.max_seq_len={model.max_seq_len} leaves no room")
    if max_tokens > room:
        raise ConfigError(
            f"--max-tokens {max_tokens} and {len(prompt)} of the prompt are more than "
            f"model.max_seq_len={model.max_seq_len}; use at most {room}"
        )


def _temperature(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
