"""Weights out of a run: from a checkpoint that four ranks saved to a Hugging Face directory, and to text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models

from hp_train.cli import main
from hp_train.config.schema import TrainerConfig
from hp_train.errors import CheckpointError, ConfigError, HpTrainError
from hp_train.generation.cache import cached
from hp_train.generation.model import load_model
from hp_train.generation.sampler import generate, next_logits, text_pieces
from hp_train.models.llama import Llama
from hp_train.pretrained.export import DTYPES, export
from hp_train.pretrained.load import load_pretrained
from hp_train.pretrained.run_tokenizer import tokenizer_of_run
from hp_train.pretrained.stored_weights import StoredWeights
from tests.distributed.ranks import run_ranks
from tests.distributed.same_numbers import TINY, Numbers, make_config, run_one

CONFIG = make_config(
    TINY,
    {
        "accelerator.pp_size": 2, "fsdp.dp_shard_size": 2, "model.tie_embeddings": True, "trainer.max_steps": 2,
        "checkpoint.every": 1, "trainer.max_grad_norm": 1.0, "model.max_seq_len": 64, "trainer.seq_len": 16,
    },
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    folder: Path
    numbers: Numbers  # the weights after the last step, as the ranks had them


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("a run") / "made"
    numbers = run_ranks(4, run_one, folder, CONFIG)[0]
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(CONFIG)))
    return Run(folder, numbers)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["hp-train", *arguments])
    return main()


def written(to: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in to.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("dtype", "max_file_bytes"), [("fp32", 30_000), ("bf16", 10**9)])
def test_a_round_trip_is_bitwise(finished: Run, tmp_path: Path, dtype: str, max_file_bytes: int) -> None:
    to = tmp_path / "out"
    with StoredWeights(finished.folder, CONFIG.model) as weights:
        done = export(weights, CONFIG.model, tokenizer_of_run(CONFIG), to, DTYPES[dtype], max_file_bytes=max_file_bytes)
    assert (done.step, done.num_files > 1) == (2, max_file_bytes < 10**9)
    expected = {name: tensor.to(DTYPES[dtype]) for name, tensor in finished.numbers.weights.items()}
    stored = written(to)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    again = Llama(CONFIG.model)
    load_pretrained(
        make_config({"model.pretrained": str(to), "model.tie_embeddings": True}).model, dict(again.named_parameters())
    )
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in again.named_parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_transformers_loads_model_and_tokenizer(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    to = tmp_path / "hf"
    assert command(monkeypatch, "export", str(finished.folder), "--to", str(to)) == 0
    assert "step 2" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(to)
    for text in ("ROMEO:\n  But, soft!", "ümlaut € 🙂\t\x00\x7f", " leading  blanks "):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    model = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    ours = Llama(CONFIG.model)
    ours.load_state_dict(
        {**finished.numbers.weights, "lm_head.weight": finished.numbers.weights["model.embed_tokens.weight"]}
    )
    tokens = torch.arange(48).view(2, 24) * 5 % 256
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=0, atol=2e-5)
    prompt = torch.tensor([list(b"ROMEO:")])
    theirs = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 6:].tolist()
    assert list(generate(ours, list(b"ROMEO:"), 24, temperature=0.0, eos_id=257)) == theirs


def test_a_cache_changes_nothing(finished: Run) -> None:
    with StoredWeights(finished.folder, CONFIG.model) as weights:
        model = load_model(weights, CONFIG.model, torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).unsqueeze(0)
    with torch.no_grad(), cached(model, capacity=40):
        cores = [block.self_attn.core for block in model.blocks.values()]
        for start, stop in ((0, 7), (7, 8), (8, 19), (19, 20), (20, 40)):
            new = slice(start, stop)
            with_cache = next_logits(model, tokens[:, new], positions[:, new])
            for block in model.blocks.values():
                block.self_attn.core = type(block.self_attn.core)(capacity=40)  # an empty one: all anew
            torch.testing.assert_close(
                with_cache, next_logits(model, tokens[:, :stop], positions[:, :stop]), rtol=0, atol=1e-5
            )
            for block, core in zip(model.blocks.values(), cores, strict=True):
                block.self_attn.core = core
    with torch.no_grad():  # and after it the model is as it was
        torch.testing.assert_close(with_cache, model(tokens)[0, -1], rtol=0, atol=1e-5)


def test_sampling(finished: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    texts = []
    for options in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"]):
        assert (
            command(monkeypatch, "sample", str(finished.folder), "--prompt", "ROMEO:", "--max-tokens", "30", *options)
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("ROMEO:") and text.endswith("\n") for text in texts)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_sampled_tokens_follow_the_distribution() -> None:
    """Of two tokens whose logits differ by log 3, one comes three times as often; by temperature 2, sqrt(3) times."""

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks: dict = {}
            self.lm_head = torch.nn.Linear(1, 2, bias=False)
            self.lm_head.weight.data = torch.tensor([[0.0], [3.0]]).log().nan_to_num(neginf=0.0)

        def model(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None) -> torch.Tensor:
            return torch.ones(*tokens.shape, 1)

    for temperature, ratio in ((1.0, 3.0), (2.0, 3.0**0.5)):
        share = sum(generate(Fixed(), [0], 4000, temperature=temperature, seed=5)) / 4000
        # four standard deviations of a mean of 4000 draws are below 0.032
        assert abs(share - ratio / (1 + ratio)) < 0.032
    assert set(generate(Fixed(), [0], 20, temperature=1e-30)) == {1}
    assert len(list(generate(Fixed(), [0], 4000, seed=5, eos_id=0))) < 100


def test_text_comes_in_whole_characters() -> None:
    ids = list("aß€🙂".encode()) + [0xFF]

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    assert list(text_pieces(iter(ids), decode)) == ["a", "ß", "€", "🙂", "\ufffd"]


def test_a_word_that_follows_the_prompt_keeps_its_blank() -> None:
    """A tokenizer of the SentencePiece kind marks blanks in front of words, and drops the first of what it decodes."""
    tokenizer = Tokenizer(models.WordLevel({"▁good": 0, "▁morning": 1, "!": 2}, unk_token="!"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "morning"
    assert "".join(text_pieces(iter([1, 1, 2]), tokenizer.decode, [0])) == " morning morning!"
    assert "".join(text_pieces(iter([0, 1, 2]), tokenizer.decode)) == "good morning!"


MISTAKES = {
    "export": [
        (["--to", "{there}"], ("--to {there} exists already",)),
        (["--to", "{new}", "--dtype", "int8", "--step", "x"],
         ("--dtype int8 is not a choice; use fp32, bf16, fp16", "--step x is not a whole number")),
        (["--to", "{new}", "--step", "7"], ("has no checkpoint of step 7; it has 1, 2",)),
        (["--to", "/"], ("--to / is not the name of a new folder",)),
        (["--to", "{file}/below"], ("cannot be made",)),
        (["--to", "{new}", "--tokenizer", "/gone.json"], ("--tokenizer /gone.json cannot be read",)),
    ],
    "sample": [
        (["--prompt", ""], ("--prompt is empty",)),
        (["--prompt", "a", "--max-tokens", "0", "--temperature", "-1", "--seed", "1.5"],
         ("--max-tokens 0 is not", "--seed 1.5 is not", "--temperature -1 is not a number; use 0 or more")),
        (["--prompt", "a", "--max-tokens", "64"], ("--max-tokens 64 and 1 of the prompt", "use at most 63")),
        (["--prompt", "a" * 64], ("--prompt has 64 tokens and model.max_seq_len=64 leaves no room",)),
        (["--prompt", "a", "--temperature", "nan"], ("--temperature nan",)),
        ([], ("--prompt",)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("verb", MISTAKES)
def test_mistakes_are_one_line_each(
    finished: Run, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    names = {"there": tmp_path, "new": tmp_path / "new", "file": tmp_path / "file"}
    names["file"].write_text("")
    for options, lines in MISTAKES[verb]:
        options = [option.format(**names) for option in options]
        assert command(monkeypatch, verb, str(finished.folder), *options) == 2, options
        said = capsys.readouterr().err.splitlines()
        assert len(said) == max(len(lines), 1) or len(lines) == 2 and len(said) == 1, said
        assert all(line.format(**names) in " ".join(said) for line in lines), said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_damage_is_never_exported(finished: Run, tmp_path: Path) -> None:
    import shutil

    run_dir = tmp_path / "copy"
    shutil.copytree(finished.folder, run_dir)
    with pytest.raises(ConfigError, match="is not of the model in config.yaml"):
        StoredWeights(run_dir, TrainerConfig().model)
    (file,) = (run_dir / "checkpoints" / "step_00000002").glob("model-rank_00000.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with StoredWeights(run_dir, CONFIG.model) as weights:
        assert weights.step == 1  # the newest that holds
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        StoredWeights(run_dir, CONFIG.model, step=2)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ConfigError, match="has no complete checkpoint yet"):
        StoredWeights(run_dir, CONFIG.model)


def test_a_failed_export_leaves_nothing(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hp_train.pretrained.export.write_safetensors", full)
    with StoredWeights(finished.folder, CONFIG.model) as weights, pytest.raises(HpTrainError, match="No space left"):
        export(weights, CONFIG.model, tokenizer_of_run(CONFIG), tmp_path / "out", torch.float32)
    assert not list(tmp_path.iterdir())


def test_special_tokens_and_companions_of_the_pretrained_directory_are_kept(tmp_path: Path) -> None:
    from hp_train.pretrained.tokenizer_files import byte_tokenizer_json, write_tokenizer_files
    from tests.pretrained.directories import TIED, random_weights, write_directory

    folder = write_directory(tmp_path / "hf", TIED, random_weights(TIED), bos_token_id=1, eos_token_id=[2, 3])
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    (folder / "tokenizer_config.json").write_text('{"chat_template": "kept"}')
    config = make_config({"model.pretrained": str(folder), "data.name": "random"})
    tokenizer = tokenizer_of_run(config)
    assert tokenizer.special_ids == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    (tmp_path / "out").mkdir()
    write_tokenizer_files(tmp_path / "out", tokenizer, 64)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"chat_template": "kept"}
