"""Model tests run on one thread: two that wait for each other on a busy machine are many times slower."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Set for the package and put back; that bits do not depend on rows with more threads is tests/kernels' part."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
