"""How long building, simulating, lowering and proving a schedule take, and that the time per step stays flat.

    python scripts/bench_schedule.py [--schedule 1f1b] [--pp 64] [--microbatches 64,128,256,512]

CPU seconds of this process; needs no torch.
"""

from __future__ import annotations

import argparse
import time

from hp_train.schedule import Costs, build_schedule, lower, simulate, verify


def measure(name: str, pp_size: int, num_microbatches: int, transport: str) -> tuple[int, list[float]]:
    """Steps of the lowered schedule, and CPU seconds to build, simulate, lower and verify it."""
    marks = [time.process_time()]
    schedule = build_schedule(name, pp_size, num_microbatches, None)
    marks.append(time.process_time())
    simulate(schedule, Costs(1, 1, 1))
    marks.append(time.process_time())
    lowered = lower(schedule, transport)
    marks.append(time.process_time())
    proof = verify(lowered, transport)
    marks.append(time.process_time())
    assert proof.ok, proof.violations
    return sum(map(len, lowered.orders)), [end - start for start, end in zip(marks, marks[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--pp", type=int, default=64)
    parser.add_argument("--microbatches", default="64,128,256,512")
    parser.add_argument("--transport", default="plain")
    args = parser.parse_args()
    print("micro-batches    steps  build_s  simulate_s  lower_s  verify_s  us_per_step")
    for num_microbatches in map(int, args.microbatches.split(",")):
        steps, (build_s, simulate_s, lower_s, verify_s) = measure(
            args.schedule, args.pp, num_microbatches, args.transport
        )
        per_step_us = 1e6 * (build_s + simulate_s + lower_s + verify_s) / steps
        print(
            f"{num_microbatches:13d} {steps:8d} {build_s:8.2f} {simulate_s:11.2f} {lower_s:8.2f} {verify_s:9.2f} "
            f"{per_step_us:12.1f}"
        )


if __name__ == "__main__":
    main()
