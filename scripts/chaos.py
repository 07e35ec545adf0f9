"""Disturb a small run at random moments, many times, and hold it against the run that nobody disturbed.

    python scripts/chaos.py --rounds 100 --seed 1 --folder /tmp/chaos

Each round starts or resumes the run with the real command, lets it come a random number of steps further, and does one
of these to it:

    rank        kill -9 of a random rank                launcher    kill -9 of the launcher
    sigterm     SIGTERM, as a scheduler sends it        save        kill -9 of everything in the middle of a save
    orphans     the launcher dies, its tasks live on    truncate    a file of the newest checkpoint is cut or flipped
    hang        a rank is stopped for good (SIGSTOP)    disk        the disk is full for a while (mounts a tmpfs)

After every round: no process is left, the attempt went on from the newest checkpoint of which every checksum holds,
and the rows so far are the undisturbed run's, bit for bit. In the end so are all rows and the final checkpoint, and the
data cursor says that every sample was read once. The first thing that is not so ends the script with status 1; a
folder that holds rounds already is gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from safetensors import safe_open

from hp_train.checkpoint.inspection import inspect
from hp_train.launch.owner import own

EVERY = 4  # steps between checkpoints
STEPS_PER_ROUND = 8  # on average a round comes half as far
SETTINGS = [
    "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.ffn_dim=64", "trainer.seq_len=32",
    "trainer.global_batch_size=4", "trainer.micro_batch_size=1", "trainer.device=cpu", "trainer.eval_every=5",
    "trainer.eval_batches=1", f"checkpoint.every={EVERY}", "checkpoint.async_save=true", "launcher.failure_timeout=8",
    "trainer.log_every=1000000", "optimizer.lr=1e-3",
]  # fmt: skip
COMPARED = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens")
PATIENCE_S = 120.0
WHOLE_RUN_S = 3600.0


class Broken(AssertionError):
    """Something that must hold did not."""


def check(holds: bool, what: str) -> None:
    """Raise Broken unless `holds`."""
    if not holds:
        raise Broken(what)


class Victim:
    """The run directory that is disturbed, and the launcher that runs in it now."""

    def __init__(self, folder: Path, settings: list[str], num_processes: int) -> None:
        self.folder = folder
        self.settings = [*settings, f"fsdp.dp_shard_size={num_processes}"]
        self.num_processes = num_processes
        self.process: subprocess.Popen | None = None
        self.log = folder.with_suffix(".log")

    def start(self, *more: str) -> None:
        """Start the run, or go on with it."""
        begun = (self.folder / "config.yaml").exists()
        words = ["resume", str(self.folder)] if begun else [*self.settings, f"trainer.run_dir={self.folder}"]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hp_train", *words, *more], stdout=log, stderr=log, start_new_session=True
            )

    def step(self) -> int:
        """Return the last step that has a row."""
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def attempt(self) -> int:
        """Return the newest attempt."""
        return max((int(path.name.split("_")[1]) for path in self.folder.glob("logs/attempt_*")), default=0)

    def has_begun(self, attempt: int) -> bool:
        """Say whether the workers of `attempt` stand and have loaded what they go on from."""
        return (self.folder / f"logs/attempt_{attempt}/attempt.json").exists()

    def workers(self) -> list[psutil.Process]:
        """Return the living workers of this run, whoever started them."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            is_ours = "hp_train.launch.worker" in line and any(str(self.folder) in word for word in line)
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def wait_for(self, what: str, happened: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + patience_s
        while not happened():
            check(time.monotonic() < deadline, f"{what} did not come in {patience_s:.0f} s")
            time.sleep(0.01)

    def come_to(self, step: int) -> None:
        """Let the run take steps until `step` has its row; it may also end before."""
        before = self.attempt()
        self.wait_for("the workers", lambda: self.ended() or bool(self.workers()))
        self.wait_for(f"step {step} of attempt {before}", lambda: self.ended() or self.step() >= step)

    def ended(self) -> bool:
        """Say whether the launcher is gone."""
        return self.process is None or self.process.poll() is not None

    def end(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the launcher and return its exit code."""
        assert self.process is not None
        return self.process.wait(timeout=patience_s)

    def leave_nothing(self) -> None:
        """Kill what still runs, whatever ends the script."""
        if self.process is not None and not self.ended():
            self.process.kill()
            self.process.wait()
        for worker in self.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def kill_rank(victim: Victim, dice: random.Random) -> None:
    """The launcher names the rank and ends; or starts the run again, which is then stopped."""
    before = victim.attempt()
    os.kill(dice.choice(victim.workers()).pid, signal.SIGKILL)
    victim.wait_for("another attempt", lambda: victim.ended() or victim.attempt() > before)
    if victim.ended():
        check(victim.end() == 1, "a killed rank must end the run with status 1")
        return
    victim.wait_for("the new attempt", lambda: victim.has_begun(before + 1))
    terminate(victim, dice)


def kill_launcher(victim: Victim, dice: random.Random) -> None:
    """Nobody is left to tell anything; the workers must follow at once."""
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    victim.wait_for("the end of the workers", lambda: not victim.workers(), 3.0)


def terminate(victim: Victim, dice: random.Random) -> None:
    """All is saved, whatever the step."""
    victim.process.send_signal(signal.SIGTERM)
    code = victim.end()
    check(code in (0, 75), f"SIGTERM must end the run saved, and it ended with status {code}")
    newest = inspect(victim.folder / "checkpoints", verify=True)[0]
    check(newest.fault is None and newest.step == victim.step(), f"step {victim.step()} is not saved: {newest}")


def kill_in_save(victim: Victim, dice: random.Random) -> None:
    """The launcher and a rank at once, as soon as a checkpoint is being written."""
    victim.wait_for("a save", lambda: victim.ended() or any(victim.folder.glob("checkpoints/*.saving")))
    time.sleep(dice.random() * 0.02)
    if not victim.ended():
        kill_launcher(victim, dice)


def leave_orphans(victim: Victim, dice: random.Random) -> None:
    """Workers without a tie to any launcher go on while the next round takes the run over; then they must stop."""
    terminate(victim, dice)
    with own(victim.folder) as ownership:
        attempt = ownership.attempt
        owner = (victim.folder / "owner.json").read_text()
    gone = {**json.loads(owner), "process_start": 0.0}  # as if this process had died
    (victim.folder / "owner.json").write_text(json.dumps(gone))
    config = max(victim.folder.glob("config*.yaml"), key=lambda path: path.stat().st_mtime)
    size = str(victim.num_processes)
    for rank in range(victim.num_processes):
        environment = {
            **os.environ, "HP_TRAIN_ATTEMPT": str(attempt), "HP_TRAIN_DEVICE": "cpu", "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        with open(victim.log, "a") as log:
            subprocess.Popen(
                [sys.executable, "-m", "hp_train.launch.worker", str(config)], env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
    before = victim.step()
    victim.wait_for("a step of the orphans", lambda: victim.step() > before or not victim.workers())
    orphans = {process.pid for process in victim.workers()}
    victim.start()
    victim.wait_for("the end of the orphans", lambda: not orphans & {process.pid for process in victim.workers()})
    victim.come_to(victim.step() + 1)
    terminate(victim, dice)


def damage_checkpoint(victim: Victim, dice: random.Random) -> None:
    """Cut or flip a file of the newest checkpoint after the run was killed; the next round must pass it over."""
    kill_launcher(victim, dice)
    records = [record for record in inspect(victim.folder / "checkpoints", verify=True) if record.fault is None]
    if len(records) < 2:
        return  # it would have to begin anew, which proves nothing of passing over
    path = dice.choice(sorted(records[0].path.iterdir()))
    content = bytearray(path.read_bytes())
    if dice.random() < 0.5:
        content = content[: dice.randrange(len(content))]
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    again = inspect(victim.folder / "checkpoints", verify=True)
    check(next(each for each in again if each.path == records[0].path).fault is not None, f"damage to {path} unseen")


def stop_a_rank(victim: Victim, dice: random.Random) -> None:
    """It holds all others up; the watchdog must end the attempt in time."""
    worker = dice.choice(victim.workers())
    os.kill(worker.pid, signal.SIGSTOP)
    before, stopped_at = victim.attempt(), time.monotonic()
    victim.wait_for("the watchdog", lambda: victim.ended() or victim.attempt() > before, 30.0)
    check(time.monotonic() - stopped_at < 8 + 12, "the watchdog came late")
    if not victim.ended():
        victim.wait_for("the new attempt", lambda: victim.has_begun(before + 1))
        terminate(victim, dice)


def fill_disk(victim: Victim, dice: random.Random) -> None:
    """Saves and rows fail for a while; training goes on, and when there is room again nothing is missing."""
    ballast = victim.folder.parent / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    time.sleep(0.3 + dice.random())
    check(not victim.ended(), "a full disk ended the run")
    ballast.unlink()
    if not victim.ended():
        victim.come_to(victim.step() + 1)
        terminate(victim, dice)


KINDS: dict[str, tuple[float, Callable[[Victim, random.Random], None]]] = {
    "rank": (3, kill_rank),
    "launcher": (3, kill_launcher),
    "sigterm": (2, terminate),
    "save": (3, kill_in_save),
    "orphans": (1, leave_orphans),
    "truncate": (2, damage_checkpoint),
    "hang": (0.5, stop_a_rank),
    "disk": (1, fill_disk),
}


def play_round(victim: Victim, kind: str, dice: random.Random, max_steps: int) -> str:
    """Run one round and check what must hold after it; return a line of what happened."""
    begun_at, step_before, attempt_before = time.monotonic(), victim.step(), victim.attempt()
    expected = next((each for each in inspect(victim.folder / "checkpoints", verify=True) if each.fault is None), None)
    victim.start(*(["launcher.max_restarts=1"] if dice.random() < 0.5 else ["launcher.max_restarts=0"]))
    target = (expected.step if expected else 0) + dice.randint(1, STEPS_PER_ROUND)
    first = attempt_before + 1
    victim.wait_for("the first step", lambda: victim.ended() or victim.has_begun(first))
    victim.come_to(min(target, max_steps - 1))
    check(not victim.ended(), f"the run ended before it was disturbed: see {victim.log}")
    KINDS[kind][1](victim, dice)
    victim.wait_for("the end of all processes", lambda: victim.ended() and not victim.workers(), 15.0)
    facts = json.loads((victim.folder / f"logs/attempt_{first}/attempt.json").read_text())
    resumed_from = expected.path.name if expected else None
    check(facts["resumed_from"] == resumed_from, f"went on from {facts['resumed_from']} instead of {resumed_from}")
    return (
        f"{kind:9} attempt {first}: from step {expected.step if expected else 0}, disturbed at {target}, "
        f"rows {step_before} -> {victim.step()}, {time.monotonic() - begun_at:.1f} s"
    )


def rows_of(folder: Path) -> list[dict]:
    """Return what a run recorded of its numbers, times left out; whole rows only."""
    text = (folder / "metrics.jsonl").read_text()
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    return [{key: json.loads(line)[key] for key in COMPARED} for line in lines]


def check_rows(victim: Victim, straight: list[dict]) -> None:
    """The rows are the undisturbed run's as far as they go. A stop leaves out an evaluation, which resume makes up."""
    rows = rows_of(victim.folder)
    for row, other in zip(rows, straight, strict=False):
        same = row == other or (row is rows[-1] and row["val_loss"] is None and {**other, "val_loss": None} == row)
        check(same, f"row of step {row['step']} is {row} instead of {other}")


def check_end(victim: Victim, reference: Path, max_steps: int) -> None:
    """Rows, tensors and data cursor are the undisturbed run's."""
    check(rows_of(victim.folder) == rows_of(reference), "the rows differ")
    last = f"checkpoints/step_{max_steps:08d}"
    ours, theirs = victim.folder / last, reference / last
    for name in sorted(path.name for path in theirs.glob("*.safetensors")):
        with safe_open(ours / name, "np") as one, safe_open(theirs / name, "np") as two:
            check(sorted(one.keys()) == sorted(two.keys()), f"{name} holds other tensors")
            for key in sorted(two.keys()):
                same = one.get_tensor(key).tobytes() == two.get_tensor(key).tobytes()
                check(same, f"{key} differs from the undisturbed run's")
    progress = [json.loads((folder / "progress.json").read_text()) for folder in (ours, theirs)]
    for key in ("step", "tokens_seen", "samples_seen"):
        check(progress[0][key] == progress[1][key], f"{key} is {progress[0][key]} instead of {progress[1][key]}")
    check(progress[0]["samples_seen"] == max_steps * 4, "the data cursor is not where the samples end")


@contextlib.contextmanager
def nothing_left(victim: Victim) -> Iterator[None]:
    """Leave no process behind, also when this script is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        victim.leave_nothing()


def give_small_disk(folder: Path) -> bool:
    """Give `folder` a disk of its own, of 24 MB, in memory; say whether that is possible here."""
    if os.path.ismount(folder):
        return True
    words = ["mount", "-t", "tmpfs", "-o", "size=24m", "chaos", str(folder)]
    return os.geteuid() == 0 and subprocess.run(words, check=False, capture_output=True).returncode == 0


def main() -> int:
    """Play the rounds and print a table; 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--until-s", type=float, default=1e9, help="begin no round after so many seconds")
    args = parser.parse_args()
    folder = args.folder.absolute()
    max_steps = max(20, args.rounds * STEPS_PER_ROUND)
    settings = [*SETTINGS, f"trainer.max_steps={max_steps}", f"trainer.seed={args.seed}"]
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    kinds = args.kinds.split(",")
    if "disk" in kinds and not give_small_disk(disk):
        print("no tmpfs can be mounted here: rounds of the kind `disk` are left out")
        kinds.remove("disk")
    reference = Victim(folder / "straight", settings, args.processes)
    if not (reference.folder / "outcome.json").exists():
        with nothing_left(reference):
            reference.start()
            check(reference.end(WHOLE_RUN_S) == 0, f"the undisturbed run failed: see {reference.log}")
    victim = Victim(disk / "disturbed", settings, args.processes)
    with nothing_left(victim):
        is_over = play(victim, reference, kinds, args, max_steps)
    if is_over and os.path.ismount(disk):
        subprocess.run(["umount", str(disk)], check=True)
    return 0


def play(victim: Victim, reference: Victim, kinds: list[str], args: argparse.Namespace, max_steps: int) -> bool:
    """Play the rounds that are still to be played, then let the run end; say whether that was reached."""
    diary = reference.folder.parent / "rounds.txt"
    victim.log = reference.folder.parent / "disturbed.log"
    played = diary.read_text().splitlines() if diary.exists() else []
    straight, started_at = rows_of(reference.folder), time.monotonic()
    for number in range(len(played), args.rounds):
        if time.monotonic() - started_at > args.until_s:
            print(f"{number} of {args.rounds} rounds played; the same command goes on")
            return False
        dice = random.Random(f"{args.seed} {number}")
        kind = dice.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]
        line = f"round {number + 1:3}: {play_round(victim, kind, dice, max_steps)}"
        check_rows(victim, straight)
        played.append(line)
        diary.write_text("".join(f"{each}\n" for each in played))
        print(line, flush=True)
    victim.start()
    check(victim.end(WHOLE_RUN_S) == 0, f"the disturbed run did not come to its end: see {victim.log}")
    check_end(victim, reference.folder, max_steps)
    counts = Counter(line.split(": ", 1)[1].split()[0] for line in played)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{len(played)} rounds ({told}), {victim.attempt()} attempts: {max_steps} rows and the final checkpoint are "
          "bitwise the undisturbed run's; no sample lost or read twice, no process left")  # fmt: skip
    return True


if __name__ == "__main__":
    sys.exit(main())
