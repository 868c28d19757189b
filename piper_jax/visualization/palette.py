"""Colours and what they mean: one table for the pictures, the pages, the notebooks and their legends.

Passes are told apart from each other, and communication from each other, also by readers who confuse red with green or
blue with yellow; communication differs from computation by its height.
"""

from __future__ import annotations

INK, MUTED, IDLE, THIN_IDLE = "#1f2933", "#66727f", "#eaeef2", "#f4f6f8"
PASS_COLORS = {"F": "#3a6fb0", "B": "#37b8a4", "BI": "#7d8f3c", "BW": "#f2c14e", "U": "#5c3d9e"}
COLORS = {
    **PASS_COLORS,
    "send": "#7a8591",
    "recv": "#bcc8d4",
    "all_reduce": "#9c323e",
    "reduce_scatter": "#e2622b",
    "all_gather": "#f4b366",
    "all_to_all": "#a646a6",
}
MEMORY_COLORS = {
    "parameters": "#3c4c5e",
    "optimizer": "#c0955a",
    "gradients": "#b9526d",
    "activations": "#4a9cc9",
    "transfers": "#cbbde0",
    "batch": "#8fb08c",
}
MEANINGS = {
    "F": "forward",
    "B": "backward",
    "BI": "backward of inputs",
    "BW": "backward of weights",
    "U": "update",
}
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")
MAX_SHADE = len(ORDINALS) - 1


def meaning(kind: str) -> str:
    """``"BI backward of inputs"``; communication is named in words already."""
    return f"{kind} {MEANINGS[kind]}" if kind in MEANINGS else kind


def shaded(color: str, shade: int) -> str:
    """``color`` (``#rrggbb``), mixed with white by a third for each ``shade``, up to the fifth."""
    keep = (2 / 3) ** min(shade, MAX_SHADE)
    return "#" + "".join(f"{round(255 - (255 - channel) * keep):02x}" for channel in _channels(color))


def ink_on(color: str) -> str:
    """White or dark, whichever has more contrast on ``color`` (relative luminance as in WCAG 2)."""
    linear = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in _channels(color)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if luminance < 0.2 else INK


def _channels(color: str) -> tuple[int, ...]:
    return tuple(int(color[at : at + 2], 16) for at in (1, 3, 5))
