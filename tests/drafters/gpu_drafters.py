"""Drafters on a card: nothing waits for the device, a captured proposal equals an eager one, tokens stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module, drafter_names
from localspec.drafters._tiny import RandomCheckpoint
from localspec.kernels.backends.triton_sm80 import TritonOps
from localspec.models import architecture
from tests.drafters.session import CONTEXT_TOKENS, Session
from tests.helpers.models import tensor_shapes

pytestmark = pytest.mark.gpu
LAWS = (
    Sampling(),
    Sampling(temperature=2.5, seed=4),
    Sampling(temperature=3.0, top_k=8, top_p=0.9, seed=9),
    Sampling(),
)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def session_of(name: str) -> Session:
    ops = TritonOps(torch.device("cuda", torch.cuda.current_device()))
    config = architecture("llama").tiny_config() | {"hidden_size": 128, "head_dim": 16, "intermediate_size": 128}
    weights = RandomCheckpoint(tensor_shapes(config, config), device=ops.device)
    model = architecture("llama").load(config, weights, ops)
    drafter = drafter_module(name).tiny(DrafterSetup(ops, model, MAX_SLOTS, CONTEXT_TOKENS))
    return Session(model, drafter, "cuda", ops.prefill_row_multiple)


def start_all(session: Session) -> None:
    for slot, length in enumerate((70, 5, 33, 2)):
        session.start(slot, ([3, 1, 4, 1, 5, 9, 2] * 12)[:length], LAWS[slot], chunk=256)


@pytest.mark.parametrize("name", drafter_names())
def test_captured_and_eager_proposals_are_equal(name: str) -> None:
    session = session_of(name)
    start_all(session)
    session.step([2, 2, 2, 2])
    depths = session.depths([3, 1, 2, 3])
    depths = replace(depths, length_bounds=tuple(bound + 40 for bound in depths.length_bounds))
    session.drafter.propose(depths, session.state, session.cache)
    with no_waiting():
        session.drafter.propose(depths, session.state, session.cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = session.drafter.propose(depths, session.state, session.cache)
    for _ in range(4):
        graph.replay()
        replayed = captured.token_ids.clone()
        eager = session.drafter.propose(depths, session.state, session.cache)
        assert torch.equal(replayed, eager.token_ids)
        session.verify(eager)
    if name not in ("off", "ngram"):
        assert bool((eager.num_drafts > 0).all())


@pytest.mark.parametrize("name", drafter_names())
def test_tokens_are_those_without_drafts(name: str) -> None:
    plain, session = session_of("off"), session_of(name)
    start_all(plain)
    start_all(session)
    for step in range(20):
        plain.step([0, 0, 0, 0])
        session.step([step % 4, (step + 1) % 4, 3, 2])
    for slot in range(4):
        assert session.answer(slot)[:20] == plain.answer(slot)[:20]
