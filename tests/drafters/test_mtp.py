"""The MTP block against its formulas in float64, and its checkpoint's faults by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS, HiddenNeeds
from localspec.drafters import mtp, pass_rows
from localspec.drafters._tiny import RandomCheckpoint
from localspec.drafters._waiting import KEPT_ROWS
from localspec.kernels.backends.reference import ReferenceOps
from localspec.models import Model, architecture
from tests.drafters.float64 import Weights, attend, gated_mlp, project, rms, rope
from tests.drafters.session import Session, fixed_draft, random_target, setup_for
from tests.helpers.models import Driver

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return random_target("llama", tmp_path_factory.mktemp("target"))


def block(embedding: Tensor, hidden: Tensor, weights: Weights, shape: mtp.MtpShape, first: int) -> Tensor:
    """Rows 0.. of the block over whole sequences. embedding, hidden: [T, D] float64 -> [T, D] after mtp.norm.

    first: rows before it are seen by none behind it.
    """
    head_dim, at = shape.attention.head_dim, "mtp.layers.0."

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, weights[f"mtp.{name}.weight"], plus_one=True)

    joined = torch.cat([norm(embedding, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], -1)
    x = joined @ weights["mtp.fc.weight"].double().T
    inner = norm(x, "layers.0.input_layernorm")
    q = project(inner, weights, f"{at}self_attn.q_proj.weight", 2 * head_dim)
    q, gate = q[..., :head_dim], q[..., head_dim:]
    k = project(inner, weights, f"{at}self_attn.k_proj.weight", head_dim)
    v = project(inner, weights, f"{at}self_attn.v_proj.weight", head_dim)
    positions = torch.arange(len(x))
    q = rope(norm(q, "layers.0.self_attn.q_norm"), positions, shape.inv_freq)
    k = rope(norm(k, "layers.0.self_attn.k_norm"), positions, shape.inv_freq)
    seen = (positions[:, None] >= positions) & ((positions >= first) | (positions[:, None] < first))
    mixed = attend(q, k, v, seen)
    x = x + (mixed * gate.flatten(1).sigmoid()) @ weights[f"{at}self_attn.o_proj.weight"].double().T
    x = x + gated_mlp(norm(x, "layers.0.post_attention_layernorm"), weights, f"{at}mlp.")
    return norm(x, "norm")


def expected_chain(
    model: Model, weights: Weights, shape: mtp.MtpShape, tokens: list[int], depth: int, first: int = 0
) -> tuple[list[int], list[float]]:
    """Greedy drafts after `tokens` and the probability of each."""
    driver = Driver(model, num_slots=1)
    rows: list[Tensor] = []
    forward = model.forward

    def keep(*arguments: object) -> object:
        found = forward(*arguments)  # type: ignore[arg-type]
        rows.append(found.hidden)
        return found

    model.forward = keep  # type: ignore[method-assign, assignment]
    try:
        driver.prefill(0, tokens[:-1])
    finally:
        model.forward = forward  # type: ignore[method-assign]
    hidden, text, drafts, scores = torch.cat(rows).double(), list(tokens), [], []
    for _ in range(depth):
        following = torch.tensor(text[1:])
        out = block(model.embed(following).double(), hidden, weights, shape, first)
        law = model.logits(out[-1:].float())[0].softmax(0)
        drafts.append(int(law.argmax()))
        scores.append(float(law.max()))
        text.append(drafts[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafts, scores


def test_drafts_are_those_of_the_formulas(model: Model) -> None:
    """After a prompt, after accepted and refused drafts: the cache of committed rows always holds true hiddens."""
    shape = mtp.tiny_shape(model.hidden_size)
    checkpoint = RandomCheckpoint(mtp.tiny_shapes(shape), seed=3)
    session = Session(model, mtp.make(shape, setup_for(model), checkpoint))
    session.start(1, list(range(3, 90)))
    session.start(2, [5, 9])
    for depth in (1, 7, 4, 7):
        session.step([0, depth, depth])
        draft = session.propose([0, 7, 7])
        assert draft.confidence is not None and draft.num_drafts.tolist() == [0, 7, 7, 0]
        for slot in (1, 2):
            text = session.state.history[slot, : int(session.state.lengths[slot])].tolist()
            tokens, scores = expected_chain(model, checkpoint.tensors, shape, text, 7)
            assert draft.token_ids[slot].tolist() == tokens
            torch.testing.assert_close(draft.confidence[slot], torch.tensor(scores), rtol=1e-3, atol=1e-5)


def test_a_trimmed_head_drafts_target_ids(model: Model) -> None:
    shape = mtp.tiny_shape(model.hidden_size)
    checkpoint = RandomCheckpoint(mtp.tiny_shapes(shape), seed=3)
    ids = torch.arange(1, model.vocab_size, 3)
    checkpoint.tensors["mtp.draft_ids"] = ids
    generator = torch.Generator().manual_seed(0)
    checkpoint.tensors["mtp.draft_head.weight"] = torch.randn(len(ids), model.hidden_size, generator=generator)
    session = Session(model, mtp.make(shape, setup_for(model), checkpoint))
    session.start(0, list(range(40)), Sampling(temperature=1.0, seed=3))
    session.step([0])
    drafts = session.propose([5]).token_ids[0]
    assert set(drafts.tolist()) <= set(ids.tolist())
    checkpoint.tensors["mtp.draft_ids"] = ids + 2
    with pytest.raises(ValueError, match="draft_ids"):
        mtp.make(shape, setup_for(model), checkpoint)


def test_faults_are_named(model: Model, tmp_path: Path) -> None:
    shape = mtp.tiny_shape(model.hidden_size)
    setup = setup_for(model)

    def altered(**changes: Tensor | None) -> RandomCheckpoint:
        checkpoint = RandomCheckpoint(mtp.tiny_shapes(shape))
        for name, tensor in changes.items():
            del checkpoint.tensors[name]
            if tensor is not None:
                checkpoint.tensors[name] = tensor
        return checkpoint

    assert len(mtp.tiny_shapes(shape)) == 15
    for name in mtp.tiny_shapes(shape):
        with pytest.raises(ValueError, match=name.rsplit(".", 1)[0].replace(".", r"\.")):
            mtp.make(shape, setup, altered(**{name: None}))
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight"):
        mtp.make(shape, setup, altered(**{"mtp.fc.weight": torch.zeros(model.hidden_size, model.hidden_size)}))
    extra = RandomCheckpoint({**mtp.tiny_shapes(shape), "mtp.layers.1.mlp.up_proj.weight": (4, 4), "model.x": (4, 4)})
    with pytest.raises(ValueError, match=r"mtp\.layers\.1"):
        mtp.make(shape, setup, extra)
    with pytest.raises(ValueError, match="export"):
        mtp.make(shape, setup, RandomCheckpoint({"model.x": (4, 4)}))
    with pytest.raises(ValueError, match="checkpoint"):
        mtp.build(setup)


def test_built_from_the_config_of_the_target(tmp_path: Path) -> None:
    model = random_target("qwen3_5", tmp_path)
    config = architecture("qwen3_5").tiny_config()
    shape = mtp.shape_of(config)
    checkpoint = RandomCheckpoint(mtp.tiny_shapes(shape))
    setup = setup_for(model, tmp_path)
    drafter = mtp.build(type(setup)(**{**setup.__dict__, "checkpoint": checkpoint}))
    assert drafter.needs == HiddenNeeds(final_norm=True) and drafter.max_depth == 7
    assert [plane.shape for plane in drafter.cache_spec.planes] == [(2, 24), (2, 24)]
    session = Session(model, drafter)
    session.start(3, list(range(20)))
    session.step([0, 0, 0, 0])
    assert session.propose([0, 0, 0, 7]).num_drafts.tolist() == [0, 0, 0, 7]
    config["text_config"]["hidden_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden size 32"):
        mtp.build(type(setup)(**{**setup.__dict__, "checkpoint": checkpoint}))


def test_a_slot_that_was_not_observed_waits(model: Model) -> None:
    shape = mtp.tiny_shape(model.hidden_size)
    session = Session(model, mtp.make(shape, setup_for(model), RandomCheckpoint(mtp.tiny_shapes(shape))))
    session.start(0, [4, 5, 6])
    session.start(1, [7])
    assert session.propose([3, 3]).num_drafts.tolist() == [3, 0] + [0] * (MAX_SLOTS - 2)
    session.drafter.forget(0)
    assert session.propose([3, 3]).num_drafts.tolist() == [0] * MAX_SLOTS
    session.step([0, 0])
    assert session.propose([3, 3]).num_drafts.tolist() == [3, 3] + [0] * (MAX_SLOTS - 2)


@pytest.mark.parametrize("pause", [3, 40, 100])
def test_after_a_pause_it_catches_up(model: Model, pause: int) -> None:
    """Steps without its drafts only store rows; a pause beyond what is kept leaves a gap that nothing reads."""
    shape = mtp.tiny_shape(model.hidden_size)
    checkpoint = RandomCheckpoint(mtp.tiny_shapes(shape), seed=3)
    session = Session(model, mtp.make(shape, setup_for(model), checkpoint))
    session.start(0, list(range(3, 40)), Sampling(temperature=3.0, seed=1))
    session.step([3])
    session.propose([3])  # runs what waits
    length = int(session.state.lengths[0])
    for _ in range(pause):
        session.verify(fixed_draft([[]], 0))
    waiting = min(pause, KEPT_ROWS)
    for _ in range(-(-waiting // 16) - 1):
        assert session.propose([5]).num_drafts[0] == 0
    session.state.sampling.temperature.zero_()
    draft = session.propose([5])
    text = session.state.history[0, : int(session.state.lengths[0])].tolist()
    assert len(text) == length + pause
    first = len(text) - 1 - KEPT_ROWS if pause > KEPT_ROWS else 0
    tokens, scores = expected_chain(model, checkpoint.tensors, shape, text, 5, first)
    assert draft.token_ids[0].tolist() == tokens and draft.confidence is not None
    torch.testing.assert_close(draft.confidence[0], torch.tensor(scores), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("windows", [[4], [2, 2], [8], [3, 9]])
def test_a_host_that_does_not_wait_catches_up_by_passes_of_its_windows(model: Model, windows: list[int]) -> None:
    shape = mtp.tiny_shape(model.hidden_size)
    checkpoint = RandomCheckpoint(mtp.tiny_shapes(shape), seed=3)
    ops = ReferenceOps(torch.device("cpu"))
    ops.waits = False
    session = Session(model, mtp.make(shape, replace(setup_for(model), ops=ops), checkpoint))
    session.start(2, list(range(3, 40)))
    for _ in range(11):
        session.verify(fixed_draft([[]], 0))
    depths = replace(session.depths([0, 0, 5]), pass_rows=pass_rows(windows))
    for _ in range(-(-11 // sum(windows)) - 1 if sum(windows) < 12 else 0):
        assert session.drafter.propose(depths, session.state, session.cache).num_drafts.tolist() == [0] * MAX_SLOTS
    draft = session.drafter.propose(depths, session.state, session.cache)
    text = session.state.history[2, : int(session.state.lengths[2])].tolist()
    tokens, _ = expected_chain(model, checkpoint.tensors, shape, text, 5)
    assert draft.token_ids.tolist() == [[-1] * 5, [-1] * 5, tokens, [-1] * 5]
    assert draft.num_drafts.tolist() == [0, 0, 5, 0] and pass_rows([16, 16]) == 16


def test_a_text_only_export_has_the_same_block() -> None:
    """Their config is the text part alone, under a name of its own."""
    whole = architecture("qwen3_5").tiny_config()
    flat = {**whole["text_config"], "tie_word_embeddings": False}
    one, other = mtp.shape_of(whole), mtp.shape_of(flat)
    assert (one.attention, one.intermediate_size) == (other.attention, other.intermediate_size)
    assert torch.equal(one.inv_freq, other.inv_freq)
