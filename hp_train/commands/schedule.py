"""Look at pipeline schedules and prove them: list, show, draw, lower, verify. Needs neither a recipe nor a GPU.

No torch. SOURCE is a schedule's name (a plugin's too), a CSV file, or `pkg.mod:builder`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hp_train import registry
from hp_train.errors import ExitCode, ScheduleError, UnrunnableScheduleError
from hp_train.schedule import SCHEDULES, TRANSPORTS, Costs, Schedule, lower, save_schedule, simulate, verify
from hp_train.schedule.draw import draw, draw_text
from hp_train.schedule.registry import schedule_names
from hp_train.schedule.residency import MIN_SWAP_GAP
from hp_train.schedule.sources import open_schedule
from hp_train.schedule.text import format_schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the verbs of `hp-train schedule` and their options."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="list|show|draw|lower|verify")
    verbs.add_parser("list", help="the schedules that have names")
    show = verbs.add_parser("show", help="the schedule as text, ranks as rows")
    picture = verbs.add_parser("draw", help="the schedule as a picture")
    lowered = verbs.add_parser("lower", help="everything the ranks do, as CSV")
    proof = verbs.add_parser("verify", help="prove that it can't deadlock or mix up tensors; exit 2 if refused")
    for verb in (show, picture, lowered, proof):
        _add_source(verb)
    for verb in (show, picture):
        verb.add_argument(
            "--costs",
            default="1,1,1",
            metavar="F,I,W[,P2P]",
            help="cost of forward, input and weight gradient, transfer",
        )
    show.add_argument("--width", type=int, default=120, help="characters a line")
    picture.add_argument(
        "--out", default=None, metavar="PATH", help=".svg or .png; default: the schedule's name and .svg"
    )
    lowered.add_argument("--out", default=None, metavar="PATH", help="CSV file; default: standard output")
    lowered.add_argument("--transport", default="plain", metavar="|".join(TRANSPORTS))
    proof.add_argument("--transport", default=None, metavar="|".join(TRANSPORTS), help="default: each of them")
    proof.add_argument(
        "--max-activations", type=int, default=None, metavar="N", help="bound on activations held by a rank"
    )
    for verb in (lowered, proof):
        _add_lowering(verb)


def _add_source(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("source", metavar="NAME|FILE.csv|pkg.mod:builder")
    verb.add_argument("--pp", type=int, default=None, metavar="N", help="pipeline ranks")
    verb.add_argument("--microbatches", type=int, default=None, metavar="N", help="micro-batches in a step")
    verb.add_argument("--stages-per-rank", type=int, default=None, metavar="N", help="default: what the schedule needs")
    verb.add_argument(
        "--set", action="append", default=[], metavar="pp.NAME.KEY=VALUE", help="a setting of a plugin's schedule"
    )


def _add_lowering(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--fsdp", type=int, default=None, metavar="N", help="shard parameters, at most N stages unsharded"
    )
    verb.add_argument("--swap", type=int, default=None, metavar="N", help="swap activations idle for N compute steps")
    verb.add_argument("--overlap", default=None, metavar="f_b|b_f", help="pair neighbouring forwards and backwards")
    verb.add_argument("--data", action="store_true", help="load on the first rank, send targets to the last")


def run(args: argparse.Namespace) -> int:
    """Do what `hp-train schedule` was asked; returns the exit code. Raises ScheduleError for a fault in the input."""
    if args.action == "list":
        return _list()
    _check_bounds(args)
    sizes = (args.pp, args.microbatches, args.stages_per_rank)
    schedule = open_schedule(args.source, *sizes, allow_code=True, settings=_settings(args))
    if args.action == "show":
        return _show(schedule, args)
    if args.action == "draw":
        return _draw(schedule, args)
    if args.action == "lower":
        return _lower(schedule, args)
    return _verify(schedule, args)


def _settings(args: argparse.Namespace) -> Any:
    """Return the settings of a plugin's schedule, typed and checked as those of a run; None if none are given."""
    if not args.set:
        return None
    component = registry.find("pp_schedule", args.source)
    section = None if component is None else component.section
    for override in args.set:
        if section is None or not override.startswith(f"{section}."):
            takes = f"takes settings below {section}" if section else "has no settings"
            raise ScheduleError(f"--set {override}: schedule {args.source} {takes}")
    from hp_train.config.compose import compose  # loads Hydra

    return registry.settings_of(component, compose(args.set).config)


def _check_bounds(args: argparse.Namespace) -> None:
    for option, low in (("--width", 1), ("--max-activations", 0), ("--fsdp", 1), ("--swap", MIN_SWAP_GAP)):
        value = getattr(args, option.removeprefix("--").replace("-", "_"), None)
        if value is not None and value < low:
            raise ScheduleError(f"{option} {value} must be at least {low}")


def _list() -> int:
    added = registry.components("pp_schedule")
    width = max(len(name) for name in schedule_names())
    for name, info in SCHEDULES.items():
        stages = _stages(info.stages_per_rank) + ("" if info.fixed_stages else " or any number")
        print(f"{name:<{width}}  {info.summary} ({stages}; {info.source}; also {', '.join(info.torch_names)})")
    for component in added:
        stages = _stages(component.stages_per_rank)
        settings = "" if component.section is None else f"; settings below {component.section}"
        print(f"{component.name:<{width}}  {component.summary or 'of a plugin'} ({stages}{settings})")
    return int(ExitCode.DONE)


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count > 1 else ''} a rank"


def _show(schedule: Schedule, args: argparse.Namespace) -> int:
    timeline = simulate(schedule, _costs(args.costs))
    if not sys.stdout.isatty():
        print(draw_text(timeline, args.width))
        return int(ExitCode.DONE)
    from rich.console import Console

    console = Console(highlight=False)
    console.print(draw_text(timeline, min(args.width, console.width), markup=True), soft_wrap=True)
    return int(ExitCode.DONE)


def _draw(schedule: Schedule, args: argparse.Namespace) -> int:
    out = (
        args.out
        if args.out is not None
        else f"{args.source.rsplit('/')[-1].removesuffix('.csv').replace(':', '.')}.svg"
    )
    draw(simulate(schedule, _costs(args.costs)), out)
    print(out)
    return int(ExitCode.DONE)


def _lower(schedule: Schedule, args: argparse.Namespace) -> int:
    lowered = _lowered(schedule, args.transport, args)
    if args.out is None:
        print(format_schedule(lowered), end="")
    else:
        save_schedule(lowered, args.out)
        print(args.out)
    return int(ExitCode.DONE)


def _verify(schedule: Schedule, args: argparse.Namespace) -> int:
    code = ExitCode.DONE
    for transport in TRANSPORTS if args.transport is None else (args.transport,):
        try:
            proof = verify(_lowered(schedule, transport, args), transport, max_activations=args.max_activations)
            violations = proof.violations
        except UnrunnableScheduleError as error:  # so there is no place for its transfers
            violations = (error.why,)
        if violations:
            more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
            print(f"{args.source}: refused under {transport}: {violations[0]}{more}")
            code = ExitCode.USER_ERROR
        else:
            peaks = " ".join(map(str, proof.peak_activations))
            print(f"{args.source}: proven under {transport}; peak activations per rank: {peaks}")
    return int(code)


def _lowered(schedule: Schedule, transport: str, args: argparse.Namespace) -> Schedule:
    return lower(schedule, transport, fsdp=args.fsdp, swap=args.swap, overlap=args.overlap, data=args.data)


def _costs(text: str) -> Costs:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or not all(0 <= number < float("inf") for number in numbers):
        raise ScheduleError(f"--costs {text} must be three or four numbers of at least 0, like 1,1,1 or 2,3,2,0.5")
    return Costs(*numbers)
