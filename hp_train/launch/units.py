"""Numbers as people read them in a terminal. Pure."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
GIB = 2**30


def count_text(value: float) -> str:
    """Return three significant digits with a prefix: 412345 -> `412k`, 51500 -> `51.5k`, 987.6 -> `988`."""
    for factor, prefix in _PREFIXES:
        if value >= 0.9995 * factor:  # 999.9k reads 1M
            return f"{_three_digits(value / factor)}{prefix}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    for limit, places in ((9.995, 2), (99.95, 1)):
        if value < limit:
            text = f"{value:.{places}f}"
            return text.rstrip("0").rstrip(".")
    return f"{value:.0f}"


def duration_text(seconds: float) -> str:
    """Return the two largest parts: 41 -> `41s`, 2460 -> `41m`, 7500 -> `2h05m`, 277000 -> `3d04h`."""
    total = max(0, round(seconds))
    if total < 100:
        return f"{total}s"
    minutes = round(total / 60)
    if minutes < 100:
        return f"{minutes}m"
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(minutes / 60)
    return f"{hours // 24}d{hours % 24:02d}h"


def memory_text(used_bytes: float, total_bytes: float | None) -> str:
    """Return e.g. `62/80 GiB`, or `1.2 GiB` where the whole is unknown."""
    used = used_bytes / GIB
    used_text = f"{used:.0f}" if used >= 9.95 else f"{used:.1f}"
    return f"{used_text}/{total_bytes / GIB:.0f} GiB" if total_bytes else f"{used_text} GiB"


def step_time_text(seconds: float) -> str:
    """Return e.g. `1.27 s/step` or `0.0123 s/step`: three significant digits."""
    return f"{seconds:.3g} s/step" if seconds < 1000 else f"{seconds:.0f} s/step"


def grad_norm_text(norm: float) -> str:
    """Return two decimals, or the power of ten where those would say nothing."""
    return f"{norm:.2f}" if 0.01 <= norm < 1000 or norm == 0 else f"{norm:.1e}"
