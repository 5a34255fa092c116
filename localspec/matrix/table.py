"""The cells of a measurement as text: a table for terminals, the same as Markdown. Knows nothing of how they came."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.matrix.bench import Cell


def table(cells: Sequence[Cell]) -> str:
    """The cells for people."""
    head = f"{'workload':10} {'drafter':14} {'depth':>5} {'active':>6} {'tok/s':>8} {'speed-up':>8}"
    lines = [f"{head} {'length':>7} {'rate':>6}  per position"]
    for cell in cells:
        speedup = f"×{cell.speedup:.2f}" if cell.speedup is not None else "-"
        positions = " ".join(f"{value:.2f}" for value in cell.per_position[:8])
        lines.append(
            f"{cell.workload:10} {cell.drafter:14} {cell.depth:>5} {cell.active:>6} {cell.tok_per_s:>8.1f} "
            f"{speedup:>8} {cell.acceptance_length:>7.2f} {cell.acceptance_rate:>6.2f}  {positions}"
        )
    return "\n".join(lines)
