"""The support matrix covers what it says, and its page shows every cell."""

from __future__ import annotations

from itertools import combinations, product

from matrix_page import PAGE, MatrixPage
from support_matrix import DEVICES, FACTORS, LEGAL, OPTIMIZERS, Cell, cells, page, pairs, reason, sample

from piper_jax import DirectiveError

LEGAL_CELLS = [cell for cell in cells() if cell.is_legal]


def is_possible(one: tuple[str, object], other: tuple[str, object]) -> bool:
    """Whether some legal cell has both values; ZeRO-0 has few optimizers."""
    given = dict((one, other))
    counts = product(FACTORS["schedule"], *(FACTORS[name] for name in ("stages", "data", "microbatches")))
    legal = (
        LEGAL[schedule](stages, microbatches)
        and stages * data <= DEVICES
        and all({"schedule": schedule, "stages": stages, "data": data, "microbatches": microbatches}.get(n, v) == v
                for n, v in given.items())
        for schedule, stages, data, microbatches in counts
    )  # fmt: skip
    return given.keys() != {"zero", "optimizer"} and any(legal)


def test_schedule_and_zero_and_optimizer_are_whole() -> None:
    triples = {(c.schedule, c.zero, c.optimizer) for c in LEGAL_CELLS if c.zero}
    assert triples == set(product(FACTORS["schedule"], (1, 2, 3), OPTIMIZERS))
    assert len(set(map(str, cells()))) == len(cells())


def test_the_other_factors_are_pairwise() -> None:
    covered = {pair for cell in LEGAL_CELLS for pair in pairs(cell)}
    wanted = {
        ((a, x), (b, y))
        for a, b in combinations(FACTORS, 2)
        for x, y in product(FACTORS[a], FACTORS[b])
        if is_possible((a, x), (b, y))
    }
    assert wanted <= covered


def test_the_sample_has_every_value() -> None:
    assert all(cell in LEGAL_CELLS for cell in sample())
    for name, values in FACTORS.items():
        assert {getattr(cell, name) for cell in sample()} == set(values) - ({0} if name == "zero" else set())


def test_reasons_leave_out_the_counts_of_the_case() -> None:
    error = DirectiveError("DualPipe pairs ranks, so pipeline_parallel=3 must be even.", help="use 2.")
    assert reason(error) == "DualPipe pairs ranks, so pipeline_parallel must be even."
    error = DirectiveError("DualPipeV takes a number from 6, not num_microbatches=3.")
    assert reason(error) == "DualPipeV takes a number from twice the pipeline degree, not this num_microbatches."


def made_up(count: int = len(cells())) -> dict[Cell, str]:
    return {cell: "" if cell.is_legal else f"{cell.schedule} says no." for cell in cells()[:count]}


def test_the_page_counts_every_cell() -> None:
    text = page(made_up())
    rows = [line for line in text.splitlines() if line.startswith("| GPipe ")]
    assert rows == ["| GPipe | 3 passed | 10 passed | 10 passed | 10 passed |"]
    assert "2. DualPipeV says no." in text
    dualpipe = next(line for line in text.splitlines() if line.startswith("| DualPipe "))
    refused = sum(c.schedule == "DualPipe" and c.zero == 1 and not c.is_legal for c in cells())
    assert f"10 passed, {refused} refused (3)" in dualpipe


def test_a_partial_run_writes_no_page() -> None:
    plugin = MatrixPage()
    plugin.outcomes = {str(cell): outcome for cell, outcome in made_up(5).items()}
    plugin.pytest_sessionfinish()
    assert not plugin.written


def test_the_committed_page_is_of_these_cells() -> None:
    """Its rows are those of a run in which every legal cell passed; reasons are the planner's."""
    expected = [line.split(" refused")[0] for line in page(made_up()).splitlines() if line.startswith("|")]
    found = [line.split(" refused")[0] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert found == expected
