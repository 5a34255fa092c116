"""The cells of a measurement as text: a table for terminals, the same as Markdown. Knows nothing of how they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localspec.matrix.bench import Cell

POSITIONS_SHOWN = 8
HEADINGS = ("workload", "drafter", "depth", "active", "tok/s", "speed-up", "length", "rate", "per position", "differ")
_LEFT = ("workload", "drafter", "per position")

Key = tuple[str, str, int, int]


def key_of(cell: Cell) -> Key:
    """What two measurements are compared by."""
    return cell.workload, cell.drafter, cell.depth, cell.active


def rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """One row of text a cell, in the order of HEADINGS."""
    return [
        (
            cell.workload,
            cell.drafter,
            str(cell.depth or "-"),
            str(cell.active),
            f"{cell.tok_per_s:.1f}",
            f"×{cell.speedup:.2f}" if cell.speedup is not None else "-",
            f"{cell.acceptance_length:.2f}",
            f"{cell.acceptance_rate:.2f}",
            " ".join(f"{value:.2f}" for value in cell.per_position[:POSITIONS_SHOWN]),
            str(cell.differs_from_off) if cell.differs_from_off is not None else "-",
        )
        for cell in cells
    ]


def table(cells: Sequence[Cell]) -> str:
    """The cells for terminals."""
    lines = [HEADINGS, *rows(cells)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if heading in _LEFT else text.rjust(width)
            for text, width, heading in zip(line, widths, HEADINGS, strict=True)
        ).rstrip()
        for line in lines
    )


def markdown(cells: Sequence[Cell]) -> str:
    """The cells as a Markdown table."""
    ruler = tuple("---" if heading in _LEFT else "---:" for heading in HEADINGS)
    lines = (HEADINGS, ruler, *rows(cells))
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def best_by_workload(cells: Sequence[Cell]) -> list[Cell]:
    """The fastest cell of each workload and number of active sequences."""
    best: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        known = best.get((cell.workload, cell.active))
        if known is None or cell.tok_per_s > known.tok_per_s:
            best[cell.workload, cell.active] = cell
    return list(best.values())


def against(cells: Sequence[Cell], earlier: Mapping[tuple[str, int], float]) -> str:
    """Each workload's fastest cell beside the rate of another measurement, by (workload, active)."""
    lines = []
    for cell in best_by_workload(cells):
        other = earlier.get((cell.workload, cell.active))
        if other:
            lines.append(
                f"{cell.workload}, {cell.active} active: {cell.tok_per_s:.1f} tok/s ({cell.drafter} {cell.depth}) "
                f"against {other:.1f}: ×{cell.tok_per_s / other:.2f}"
            )
    return "\n".join(lines)
