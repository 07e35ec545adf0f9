"""Preparing text: nothing lost, the same bytes however it is done, bounded memory, and all or nothing."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train import new_folder
from hp_train.data import reading, tokenizer
from hp_train.data.prepare import Progress, prepare
from hp_train.data.reading import InputFile
from hp_train.data.token_folder import TokenIndex
from hp_train.data.tokenizer import FileTokenizer, cut_into_pieces
from hp_train.errors import ConfigError, HpTrainError

EOS = 257
TEXT = (
    "Now is the winter of our discontent\nMade glorious summer by this sun of York; \u2014 \u00e9t\u00e9 \U0001f3ad\n"
)


def documents_of(folder: Path) -> list[list[int]]:
    index = TokenIndex.read(folder)
    tokens = np.fromfile(folder / "tokens.bin", dtype=np.dtype(index.dtype).newbyteorder("<"))
    offsets = np.fromfile(folder / "documents.bin", dtype="<u8").astype(int)
    return [tokens[start:stop].tolist() for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real byte-level BPE with an end-of-document token, trained here."""
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([TEXT * 50], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    model.save(str(path))
    return path


def test_documents_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(TEXT)
    (tmp_path / "in" / "b.jsonl").write_text(
        '{"text": "one", "id": 1}\n\n{"text": ""}\n{"id": 2, "text": "two\\n\\u00e9"}\r\n'
    )
    (tmp_path / "in" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}'))
    (tmp_path / "in" / "d.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbffour"))
    (tmp_path / "in" / "notes.pdf").write_bytes(b"\xff")  # not a kind of file that is read
    prepared = prepare([tmp_path / "in"], tmp_path / "out")
    expected = [TEXT, "one", "two\n\u00e9", "three", "four"]
    assert documents_of(tmp_path / "out") == [[*text.encode(), EOS] for text in expected]
    assert prepared.num_empty_documents == 1
    assert prepared.index == TokenIndex.read(tmp_path / "out")
    sources = json.loads((tmp_path / "out" / "sources.json").read_text())
    assert [source["name"] for source in sources] == ["a.txt", "b.jsonl", "c.jsonl.gz", "d.txt.gz"]
    assert sources[0]["bytes"] == len(TEXT.encode())
    assert not list(tmp_path.glob("*.tmp-*"))


def test_without_end_of_document_bytes_fit_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    index = prepare([tmp_path / "a.txt"], tmp_path / "out", eos=False).index
    assert (tmp_path / "out" / "tokens.bin").read_bytes() == TEXT.encode()
    assert index.dtype == "uint8" and index.max_token_id == max(TEXT.encode())


def test_a_tokenizer_file_encodes_as_its_library_does(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": TEXT[start:]}) + "\n" for start in range(5)))
    index = prepare([tmp_path / "a.jsonl"], tmp_path / "out", str(bpe), field="body").index
    oracle = tokenizers.Tokenizer.from_file(str(bpe))
    eos = oracle.token_to_id("<|endoftext|>")
    assert documents_of(tmp_path / "out") == [[*oracle.encode(TEXT[start:]).ids, eos] for start in range(5)]
    assert index.vocabulary.tokenizer == "bpe.json" and index.vocabulary.eos_id == eos
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bpe.read_bytes()


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_any_number_of_workers_writes_the_same_bytes(kind: str, bpe: Path, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    with open(tmp_path / "a.jsonl", "w") as file:
        for length in numbers.integers(0, 400, size=1000):
            file.write(json.dumps({"text": "".join(numbers.choice(list(TEXT), size=length))}) + "\n")
    (tmp_path / "b.txt").write_text(TEXT * 12_000)  # more than one piece
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "a.jsonl"]
    for num_workers in (1, 2, 3) if kind == "bpe" else (1, 2):
        prepare(inputs, tmp_path / f"out{num_workers}", "byte" if kind == "byte" else str(bpe), num_workers=num_workers)
        assert files_of(tmp_path / f"out{num_workers}") == files_of(tmp_path / "out1")


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["a", "\u00e9", "\U0001f3ad", " ", "\n", "--", "--\n", "\n--\n", "\r\n", "long word"]),
        max_size=60,
    )
)
def test_pieces_and_separators_do_not_depend_on_how_the_file_is_read(
    parts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file cut by blocks and pieces of a few bytes gives what its text, held as a whole, gives."""
    text = "".join(parts)
    path = tmp_path_factory.getbasetemp() / "parts.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", 8)
        patch.setattr(tokenizer, "PIECE_BYTES", 8)
        patch.setattr(reading, "_BLOCK_BYTES", 5)
        for separator in (None, "--"):
            found: list[list[bytes]] = [[]]
            input_file = InputFile(path)
            for task in input_file.tasks("text", separator):
                found[-1].append(task.data)
                if task.ends_document:
                    found.append([])
            assert found.pop() == []
            assert [pieces for pieces in found if any(pieces)] == [
                cut_into_pieces(document) for document in documents_by_lines(text.encode(), separator) if document
            ]


def documents_by_lines(text: bytes, separator: str | None) -> list[bytes]:
    """What a separator line means, by definition: documents are the runs of lines between such lines."""
    documents = [b""]
    for line in text.split(b"\n"):
        if separator is not None and line.removesuffix(b"\r") == separator.encode():
            documents.append(b"")
        else:
            documents[-1] += line + b"\n"
    last_line = text.split(b"\n")[-1]
    if separator is None or last_line.removesuffix(b"\r") != separator.encode():
        documents[-1] = documents[-1][:-1]  # the newline that the last line does not have
    return documents


def test_a_long_document_gives_the_same_tokens_from_text_and_from_jsonl(
    bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 300)
    monkeypatch.setattr(tokenizer, "PIECE_BYTES", 300)
    text = TEXT * 40 + "x" * 1000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    prepare([tmp_path / "a.txt"], tmp_path / "from_text", str(bpe))
    prepare([tmp_path / "a.jsonl"], tmp_path / "from_jsonl", str(bpe))
    assert documents_of(tmp_path / "from_text") == documents_of(tmp_path / "from_jsonl")
    decoded = tokenizers.Tokenizer.from_file(str(bpe)).decode(documents_of(tmp_path / "from_text")[0])
    assert decoded == text


BAD_INPUTS = {
    "not JSON": (b'{"text": "a"}\n{"text": \n', "in.jsonl:2: not JSON (Expecting value"),
    "not an object": (b'["text"]\n', "in.jsonl:1: not a JSON object but a list"),
    "field missing": (
        b'{"text": "a"}\n\n{"body": "b", "id": 1}\n',
        "in.jsonl:3: no field 'text'; it has 'body', 'id'; use --field",
    ),
    "field not text": (b'{"text": 5}\n', "in.jsonl:1: field 'text' is not text but an int"),
    "half a character": (b'{"text": "\\ud800"}\n', "in.jsonl:1: field 'text' holds half of a surrogate pair"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "b"}\n{"text": "\xff"}\n', "in.jsonl:3: not UTF-8 text (byte 0xff)"),
    "nested too deep": (b"[" * 200_000, "in.jsonl:1: not JSON"),
    "no text at all": (b"\n\n", "the inputs hold no text: 1 files, 2 bytes"),
    "only empty documents": (b'{"text": ""}\n', "the inputs hold no text"),
}


@pytest.mark.parametrize("bad", BAD_INPUTS)
def test_bad_input_is_named_by_file_and_line_and_leaves_nothing(bad: str, tmp_path: Path) -> None:
    data, message = BAD_INPUTS[bad]
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        prepare([tmp_path / "in.jsonl"], tmp_path / "out")
    (line,) = refused.value.messages
    assert message in line and "\n" not in line
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl"]


def test_a_fault_in_a_worker_is_the_same_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(TEXT.encode() * 20_000 + b"\xff" + TEXT.encode() * 20_000)
    with pytest.raises(ConfigError, match=r"in.txt:40001: not UTF-8 text \(byte 0xff\)"):
        prepare([tmp_path / "in.txt"], tmp_path / "out", num_workers=2)
    assert sorted(os.listdir(tmp_path)) == ["in.txt"]


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(TEXT.encode())[:-12])
    (tmp_path / "a.pdf").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as refused:
        prepare([tmp_path / "nowhere.txt", tmp_path / "a.pdf", tmp_path / "empty"], tmp_path / "out")
    assert [line.removeprefix(f"{tmp_path}/") for line in refused.value.messages] == [
        "nowhere.txt does not exist",
        "a.pdf: cannot read this kind of file; use .txt, .jsonl, .txt.gz, .jsonl.gz, .parquet, or hf:NAME",
        "empty holds no .txt, .jsonl, .txt.gz, .jsonl.gz, .parquet file",
    ]
    with pytest.raises(ConfigError, match=r"cut.txt.gz is damaged: "):
        prepare([tmp_path / "cut.txt.gz"], tmp_path / "out")


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 2 << 20)
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n{"text": "' + b"x" * (4 << 20))
    with pytest.raises(ConfigError, match="in.jsonl:2: the line is longer than 2 MiB"):
        prepare([tmp_path / "in.jsonl"], tmp_path / "out")


def test_what_is_there_already_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    before = files_of(tmp_path / "out")
    for out in (tmp_path / "out", tmp_path / "a.txt"):
        with pytest.raises(ConfigError, match="exists already; choose another folder or remove it"):
            prepare([tmp_path / "a.txt"], out)
    assert files_of(tmp_path / "out") == before and (tmp_path / "a.txt").read_text() == TEXT
    (tmp_path / "empty").mkdir()
    prepare([tmp_path / "a.txt"], tmp_path / "empty")
    assert files_of(tmp_path / "empty") == before


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(new_folder, "sync", no_space)
    with pytest.raises(HpTrainError, match="writing .*/out failed: No space left on device") as failed:
        prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert not isinstance(failed.value, ConfigError)
    assert sorted(os.listdir(tmp_path)) == ["a.txt"]


def test_end_of_document_must_be_known(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    nameless = tmp_path / "nameless.json"
    nameless.write_text(bpe.read_text().replace("<|endoftext|>", "<end>"))
    with pytest.raises(
        ConfigError, match="has no end-of-document token of a known name; use --eos-token TOKEN or --no-eos"
    ):
        prepare([tmp_path / "a.txt"], tmp_path / "out", str(nameless))
    with pytest.raises(ConfigError, match="--eos-token <stop>: the tokenizer .* has no such token"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", str(nameless), eos_token="<stop>")
    prepare([tmp_path / "a.txt"], tmp_path / "out", str(nameless), eos_token="<end>")
    assert documents_of(tmp_path / "out")[0][-1] == FileTokenizer(str(nameless)).token_id("<end>")
    nameless.write_text("{}")
    with pytest.raises(ConfigError, match="nameless.json is no tokenizer.json"):
        prepare([tmp_path / "a.txt"], tmp_path / "out2", str(nameless))


def test_progress_counts_the_bytes_on_disk(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT * 30_000)
    reports: list[Progress] = []
    prepare([tmp_path], tmp_path / "out", report=reports.append)
    assert [report.read_bytes for report in reports] == sorted(report.read_bytes for report in reports)
    assert reports[-1].read_bytes == reports[-1].total_bytes == 60_000 * len(TEXT.encode())
    assert reports[-1].num_tokens == TokenIndex.read(tmp_path / "out").num_tokens


MEASURED = """
import resource, sys
from pathlib import Path
from hp_train.data.prepare import prepare
prepare([sys.argv[1]], Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("line_bytes", [80, 1 << 40], ids=["lines", "no line end"])
def test_memory_does_not_grow_with_the_corpus(line_bytes: int, tmp_path: Path) -> None:
    """48 MB take no more than 2 MB take, within 24 MB: a few pieces of 1 MiB as text, ids and bytes of the file."""
    peaks = []
    for name, num_mib in (("small", 2), ("large", 48)):
        file = tmp_path / f"{name}.txt"
        with open(file, "wb") as out:
            block = (b"x" * min(line_bytes - 1, 1 << 20) + (b"\n" if line_bytes < 1 << 20 else b"")) * max(
                1, (1 << 20) // line_bytes
            )
            for _ in range(num_mib):
                out.write(block)
        command = [sys.executable, "-c", MEASURED, str(file), str(tmp_path / name)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024)
        file.unlink()
    assert peaks[1] - peaks[0] < 24, f"{peaks} MiB"


def test_a_process_killed_in_the_middle_leaves_no_folder_and_no_worker(tmp_path: Path) -> None:
    pipe = tmp_path / "slow.txt"  # a pipe that never ends keeps the reader in the middle of its work
    os.mkfifo(pipe)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom hp_train.data.prepare import prepare\n"
        "if __name__ == '__main__':\n    prepare([sys.argv[1]], Path(sys.argv[2]), num_workers=2)\n"
    )
    process = subprocess.Popen([sys.executable, str(script), str(pipe), str(tmp_path / "out")])
    with open(pipe, "wb") as feed:
        feed.write(TEXT.encode() * 100_000)
        feed.flush()
        deadline = time.monotonic() + 20
        while not (workers := worker_processes(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(list(tmp_path.glob("out.tmp-*"))) == 1 and workers
        process.send_signal(signal.SIGKILL)
        process.wait()
    gone, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    assert not (tmp_path / "out").exists()


def worker_processes(pid: int) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(pid).children(recursive=True) if "spawn_main" in " ".join(child.cmdline())
    ]
