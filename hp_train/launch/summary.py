"""What is printed when a run has ended: where it is, what it reached, and the command that goes on. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from hp_train.config.schema import TrainerConfig
from hp_train.config.typed_value import key_of
from hp_train.launch.files import read_json
from hp_train.launch.history import AttemptFacts, StepRow, read_facts, read_rows
from hp_train.launch.outcome import Cause, Outcome
from hp_train.launch.plain_log import mean, speed_text
from hp_train.launch.run_dir import attempt_dir

_MAX_STEPS = "trainer.max_steps"


def summarize(run_dir: Path, config: TrainerConfig, outcome: Outcome) -> list[str]:
    """Return the lines of the summary of a run that `outcome` ended."""
    rows = read_rows(run_dir / "metrics.jsonl")
    facts = read_facts(attempt_dir(run_dir, outcome.attempt))
    lines = [f"{_headline(outcome)}: {run_dir}"]
    if rows and config.data.name != "random":
        lines.append("  " + _losses(rows))
    if rows and facts is not None:
        speed = _speed(rows, facts)
        lines.extend([f"  {speed}"] if speed else [])
    lines.append(f"  go on with: {continue_command(run_dir, config, outcome)}")
    return lines


def continue_command(run_dir: Path, config: TrainerConfig, outcome: Outcome) -> str:
    """Return the command that goes on from here as this attempt did: to more steps when all are done, else just on."""
    changes = _changes(run_dir, outcome.attempt)
    if outcome.cause is Cause.DONE:
        changes = [change for change in changes if key_of(change) != _MAX_STEPS]
        changes.append(f"{_MAX_STEPS}={2 * max(config.trainer.max_steps, outcome.step)}")
    return " ".join(["hp-train resume", *map(shlex.quote, [str(run_dir), *changes])])


def _changes(run_dir: Path, attempt: int) -> list[str]:
    """Return what was typed behind `resume` when the launcher of `attempt` was started; it held for that start alone.

    A plain run that went on by trainer.resume typed the whole config, of which the length is what a resume needs.
    """
    for number in range(attempt, 1, -1):  # a restart is of the same launcher, which wrote one for its first attempt
        capsule = read_json(run_dir / f"capsule.attempt_{number}.json")
        if capsule is not None:
            typed = [str(override) for override in capsule.get("overrides", [])]
            is_whole = any(key_of(override) == "trainer.resume" for override in typed)
            return [override for override in typed if key_of(override) == _MAX_STEPS] if is_whole else typed
    return []


def _headline(outcome: Outcome) -> str:
    if outcome.cause is Cause.DONE:
        return f"done at step {outcome.step}"
    if outcome.cause.is_saved:
        if outcome.committed_step >= outcome.step:
            return f"stopped and saved at step {outcome.step}"
        return f"stopped at step {outcome.step}; saved up to step {outcome.committed_step}"
    word = "diverged" if outcome.cause in (Cause.DIVERGED, Cause.NON_FINITE) else "failed"
    if outcome.cause is Cause.CANCELLED:
        word = "ended without saving"
    return f"{word} at step {outcome.step}"


def _losses(rows: list[StepRow]) -> str:
    losses = [(row.step, row.loss) for row in rows if row.loss is not None]
    parts = []
    if losses:
        (first_step, first), (last_step, last) = losses[0], losses[-1]
        parts.append(f"loss {first:.3f} (step {first_step}) to {last:.3f} (step {last_step})")
    evaluations = [(row.step, row.val_loss) for row in rows if row.val_loss is not None]
    if evaluations:
        step, value = evaluations[-1]
        parts.append(f"validation loss {value:.3f} (step {step})")
    return ", ".join(parts) or "no loss recorded"


def _speed(rows: list[StepRow], facts: AttemptFacts) -> str | None:
    """Return the mean speed of this attempt's steps; its first, which warms up, only if there is no other."""
    mine = [row for row in rows if row.step >= facts.first_step]
    step_time_s = mean(row.step_time_s for row in mine[1:] or mine)
    return speed_text(facts.tokens_per_step / step_time_s, facts) if step_time_s else None
