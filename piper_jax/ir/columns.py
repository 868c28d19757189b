"""Text in columns, and sizes as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, left_from: int | None = None
) -> Iterable[str]:
    """Lines with aligned columns: the first ``left`` and those from ``left_from`` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if k < left or (left_from is not None and k >= left_from) else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def bytes_text(nbytes: float) -> str:
    """``"1.50 GiB"``, in powers of 1024."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.2f} {name}"
    return f"{nbytes:.0f} B"
