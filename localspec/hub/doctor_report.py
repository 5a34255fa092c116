"""What a check of `localspec doctor` says, and what all of them mean for its exit code. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localspec.hub.records import EXIT_FAILED, EXIT_MACHINE_CANNOT

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One line of the report. `machine` marks failures that no setting mends (exit code 3)."""

    name: str
    status: Status
    finding: str
    advice: str = ""
    machine: bool = False


@dataclass(frozen=True)
class Report:
    """All checks in order."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """0: nothing failed; 3: this machine cannot; 1: something else failed."""
        failed = [check for check in self.checks if check.status == "failed"]
        if not failed:
            return 0
        return EXIT_MACHINE_CANNOT if any(check.machine for check in failed) else EXIT_FAILED


def in_gib(size_bytes: int) -> str:
    """A size for a finding."""
    return f"{size_bytes / 2**30:.1f} GiB"
