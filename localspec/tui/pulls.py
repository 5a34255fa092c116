"""The models that are being fetched. They go on while the screen that started them is closed; knows no widget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

from localspec.api.library import LibraryError, ModelLibrary, PullStep

Ended = Callable[[str, str], None]
"""Told (name, problem) when a pull ends; the problem is empty when the model is ready."""


class Pulls:
    """At most one pull a model. All calls belong to one event loop."""

    def __init__(self, library: ModelLibrary, ended: Ended) -> None:
        self._library = library
        self._ended = ended
        self._steps: dict[str, PullStep] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}

    def step(self, name: str) -> PullStep | None:
        """Where the pull of this model is; None while none runs."""
        return self._steps.get(name)

    def problem(self, name: str) -> str:
        """Why the last pull of this model failed; empty if it did not."""
        return self._problems.get(name, "")

    @property
    def names(self) -> tuple[str, ...]:
        """Models that are being fetched, the oldest pull first."""
        return tuple(self._steps)

    def start(self, name: str) -> None:
        """Begin, or nothing where it runs already."""
        if name not in self._tasks:
            self._steps[name] = PullStep("locate", f"looking for {name}")
            self._tasks[name] = asyncio.create_task(self._run(name))

    def stop(self, name: str) -> None:
        """End a pull; what was fetched is kept for the next one."""
        if name in self._tasks:
            self._tasks[name].cancel()

    async def close(self) -> None:
        """End all of them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str) -> None:
        problem = f"Fetching {name} ended before it was done; pull it again to go on."
        try:
            async with aclosing(cast("AsyncGenerator[PullStep, None]", self._library.pull(name))) as steps:
                async for step in steps:
                    if step.stage != "note":
                        self._steps[name] = step
                    problem = "" if step.stage == "done" else problem
        except asyncio.CancelledError:
            problem = f"Fetching {name} is stopped; the next pull goes on from there."
            raise
        except LibraryError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{name} cannot be fetched: {error}"
        finally:
            self._tasks.pop(name, None)
            self._steps.pop(name, None)
            self._problems[name] = problem
            self._ended(name, problem)
