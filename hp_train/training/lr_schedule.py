"""The learning rate of a step as a pure function. Training floor, but no torch: plans and plots use it too.

Steps are counted from 1. The rise is linear from zero and reaches the peak at step `warmup_steps`; the shapes that fall
reach `min_lr_ratio` times the peak at the last step of the schedule and stay there.
"""

from __future__ import annotations

import math

from hp_train import registry
from hp_train.config.schema import LrSchedulerSection

WSD_DECAY_SHARE = 0.2  # of the schedule; Hu et al. 2024 (MiniCPM), section 4


def learning_rate(step: int, config: LrSchedulerSection, peak_lr: float, max_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1.

    The schedule is stretched over `config.total_steps`, or over `max_steps` where that is null, so a run that is cut
    short and resumed follows the curve of the whole. A warm-up that is longer than the schedule is simply cut short.
    """
    assert step >= 1, f"steps are counted from 1, got {step}"
    if step <= config.warmup_steps:
        return peak_lr * (step / config.warmup_steps)
    total_steps = max_steps if config.total_steps is None else config.total_steps
    plugged = registry.find("lr_scheduler", config.name)
    if plugged is not None:
        own = None if plugged.config is None else getattr(config, plugged.name)
        return peak_lr * registry.resolve(plugged.build)(step, config.warmup_steps, total_steps, own)
    fallen = _share_of_fall(config.name, step, config.warmup_steps, total_steps)
    return peak_lr * (1.0 - (1.0 - config.min_lr_ratio) * fallen)  # in this form never above the peak by rounding


def _share_of_fall(name: str, step: int, warmup_steps: int, total_steps: int) -> float:
    """Return 0 at the peak and 1 at the floor."""
    if name == "constant":
        return 0.0
    start = warmup_steps
    if name == "wsd":
        start = max(warmup_steps, total_steps - max(1, round(WSD_DECAY_SHARE * total_steps)))
    progress = 1.0 if step >= total_steps else max(0.0, (step - start) / (total_steps - start))
    if name == "cosine":  # Loshchilov and Hutter 2017
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    assert name in ("linear", "wsd"), f"no such schedule: {name}"
    return progress
