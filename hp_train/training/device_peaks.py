"""Dense bf16 peaks of accelerators, the denominator of model FLOP utilization. Constants and one look-up. No torch.

A device that is not in the table has no MFU: a guess would look like a measurement.
"""

from __future__ import annotations

import re

PEAK_BF16_FLOPS = (
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("GH200", 9.89e14),
    ("H200 NVL", 8.35e14),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("H800", 9.89e14),
    ("H20", 1.48e14),
    ("A100", 3.12e14),
    ("A800", 3.12e14),
    ("A40", 1.497e14),
    ("A30", 1.65e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("L40S", 3.62e14),
    ("L40", 1.81e14),
    ("L4", 1.21e14),
    ("RTX 5090", 2.095e14),
    ("RTX 4090", 1.65e14),
    ("RTX 3090", 7.1e13),
)
"""Part of a device's name -> FLOP/s without sparsity, from the vendor's data sheets; the first that fits counts."""


def peak_flops(name: str) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None if it is not known.

    The words of an entry must stand in `name` as whole words, so that an A100 is not taken for an A10.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if "laptop" in words:  # slower than its desktop namesake, by how much depends on the maker
        return None
    for part, peak in PEAK_BF16_FLOPS:
        if set(part.lower().split()) <= set(words):
            return peak
    return None
