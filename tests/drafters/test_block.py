"""DFlash, DFlash2 and DSpark against their formulas in float64, DFlash also against transformers' implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localspec.core.records import HiddenNeeds
from localspec.drafters import Drafter, dflash, dspark
from localspec.drafters._block_shape import BlockConfig, BlockShape, LayerView, read_block_shape
from localspec.drafters._block_tiny import tiny_block_names, tiny_block_shape
from localspec.drafters._tiny import RandomCheckpoint
from localspec.drafters._waiting import KEPT_ROWS
from localspec.models import Model
from tests.drafters.float64 import Weights, attend, gated_mlp, project, rms, rope
from tests.drafters.session import Session, fixed_draft, layer_outputs_of, random_target, setup_for

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return random_target("llama", tmp_path_factory.mktemp("target"))


def convolve(x: Tensor, source: Tensor, weights: Weights, at: str, side: int, shape: BlockShape) -> Tensor:
    """y_t = sum_tap (base + delta_t) * x_{t - tap} within the block."""
    base = weights[f"{at}base_kernel"].double()[side]
    groups = shape.hidden_size // shape.conv_group_size
    delta = source @ weights[f"{at}kernel_projection.weight"].double().T
    delta = delta.view(len(x), 2, shape.conv_taps, groups)[:, side].repeat_interleave(shape.conv_group_size, -1)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(shape.conv_taps, row + 1)):
            out[row] += (base[tap] + delta[row, tap]) * x[row - tap]
    return out


def block(outputs: dict[int, Tensor], embedding: Tensor, weights: Weights, shape: BlockShape) -> Tensor:
    """outputs: each [T, D] of the text; embedding [B, D] of the block behind it -> [B, D] after the final norm."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, weights[f"{name}.weight"], shape.norm_eps)

    taps = torch.cat([outputs[layer].double() for layer in shape.layer_outputs], -1)
    context = norm(taps @ weights["fc.weight"].double().T, "hidden_norm")
    count, x = len(context), embedding
    positions = torch.arange(count + len(x))
    for index, view in enumerate(shape.layers):
        at = f"layers.{index}."
        inner = source = norm(x, f"{at}input_layernorm")
        if shape.conv_taps:
            inner = convolve(inner, source, weights, f"{at}attention_conv.", 0, shape)
        q = project(inner, weights, f"{at}self_attn.q_proj.weight", shape.head_dim)
        k, v = (
            project(torch.cat([context, inner]), weights, f"{at}self_attn.{part}_proj.weight", shape.head_dim)
            for part in "kv"
        )
        q = rope(norm(q, f"{at}self_attn.q_norm"), positions[count:], shape.inv_freq)
        k = rope(norm(k, f"{at}self_attn.k_norm"), positions, shape.inv_freq)
        distance = positions[count:, None] - positions
        visible = torch.ones_like(distance, dtype=torch.bool)
        if view.window:
            visible &= distance.abs() < view.window
        if view.causal:
            visible &= distance >= 0
        mixed = attend(q, k, v, visible) @ weights[f"{at}self_attn.o_proj.weight"].double().T
        if shape.conv_taps:
            mixed = convolve(mixed, source, weights, f"{at}attention_conv.", 1, shape)
        x = x + mixed
        inner = source = norm(x, f"{at}post_attention_layernorm")
        if shape.conv_taps:
            inner = convolve(inner, source, weights, f"{at}mlp_conv.", 0, shape)
        inner = gated_mlp(inner, weights, f"{at}mlp.")
        if shape.conv_taps:
            inner = convolve(inner, source, weights, f"{at}mlp_conv.", 1, shape)
        x = x + inner
    return norm(x, "norm")


def hiddens(model: Model, weights: Weights, shape: BlockShape, text: list[int], num_rows: int) -> Tensor:
    outputs = layer_outputs_of(model, text[:-1], shape.layer_outputs)
    ids = torch.tensor([text[-1]] + [shape.mask_token_id] * (num_rows - 1))
    return block(outputs, model.embed(ids).double() * shape.embedding_scale, weights, shape)


def base_logits(model: Model, hidden: Tensor, shape: BlockShape) -> Tensor:
    logits = model.logits(hidden.float()).double()
    return shape.softcap * torch.tanh(logits / shape.softcap) if shape.softcap else logits


def texts_of(session: Session) -> dict[int, list[int]]:
    return {slot: session.state.history[slot, : int(session.state.lengths[slot])].tolist() for slot in session.active}


def running(model: Model, drafter: Drafter) -> Session:
    """Two sequences after accepted and refused drafts."""
    session = Session(model, drafter)
    session.start(0, list(range(3, 80)))
    session.start(2, [5, 9])
    session.step([2, 0, 5])
    session.step([0, 0, 1])
    return session


VIEWS = {
    "windowed causal, full": (LayerView(9, True), LayerView()),
    "windowed on both sides": (LayerView(3, False), LayerView(70, False)),
    "causal": (LayerView(0, True), LayerView(4, True)),
}


@pytest.mark.parametrize("views", list(VIEWS))
@pytest.mark.parametrize("conv_taps", [0, 2])
def test_dflash_drafts_are_those_of_the_formulas(model: Model, views: str, conv_taps: int) -> None:
    shape = replace(tiny_block_shape(model, conv_taps), layers=VIEWS[views], embedding_scale=1.5, softcap=9.0)
    checkpoint = RandomCheckpoint(tiny_block_names(shape), seed=2)
    session = running(model, dflash.make(shape, dflash.SelectorShape(), setup_for(model), checkpoint))
    assert session.drafter.max_depth == 5
    for depths in ([5, 0, 5], [2, 0, 4]):
        draft = session.propose(depths)
        assert draft.confidence is not None
        for slot, text in texts_of(session).items():
            depth = depths[slot]
            hidden = hiddens(model, checkpoint.tensors, shape, text, depth + 1)[1:]
            law = base_logits(model, hidden, shape).softmax(-1)
            assert draft.token_ids[slot, :depth].tolist() == law.argmax(-1).tolist()
            torch.testing.assert_close(draft.confidence[slot, :depth].double(), law.amax(-1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pause", [40, 90])
def test_dflash_after_a_pause(model: Model, pause: int) -> None:
    """It waits until the stored rows are run; what was not stored is seen by nobody."""
    shape = tiny_block_shape(model)
    checkpoint = RandomCheckpoint(tiny_block_names(shape), seed=2)
    session = Session(model, dflash.make(shape, dflash.SelectorShape(), setup_for(model), checkpoint))
    session.start(0, list(range(3, 60)))
    session.step([2])
    session.propose([2])
    for _ in range(pause):
        session.verify(fixed_draft([[]], 0))
    for _ in range(-(-min(pause, KEPT_ROWS) // 16) - 1):
        assert session.propose([5]).num_drafts[0] == 0
    draft = session.propose([5])
    text = texts_of(session)[0]
    first = len(text) - 1 - KEPT_ROWS if pause > KEPT_ROWS else 0
    outputs = layer_outputs_of(model, text[:-1], shape.layer_outputs)
    ids = torch.tensor([text[-1]] + [shape.mask_token_id] * 5)
    hidden = block(
        {layer: rows[first:] for layer, rows in outputs.items()}, model.embed(ids).double(), checkpoint.tensors, shape
    )
    assert draft.token_ids[0].tolist() == base_logits(model, hidden[1:], shape).argmax(-1).tolist()


def test_dflash2_walks_through_the_candidates(model: Model) -> None:
    shape, selector = tiny_block_shape(model, conv_taps=2), dflash.SelectorShape(rank=8, num_candidates=5)
    checkpoint = RandomCheckpoint({**tiny_block_names(shape), **dflash.tiny_selector_names(selector, model)}, seed=4)
    weights = checkpoint.tensors
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{name}"] *= 3.0  # so that the transitions decide
    session = running(model, dflash.make(shape, selector, setup_for(model), checkpoint))
    draft = session.propose([5, 0, 5])
    changed = 0
    for slot, text in texts_of(session).items():
        hidden = hiddens(model, weights, shape, text, 6)[1:]
        unary, ids = base_logits(model, hidden, shape).topk(5)
        context = hidden @ weights["candidate_selector.hidden_projection.weight"].double().T
        previous, expected = text[-1], []
        for place in range(5):
            gate = weights["candidate_selector.predecessor_codebook"][previous].double() * context[place]
            scores = unary[place] + weights["candidate_selector.successor_codebook"][ids[place]].double() @ gate
            previous = int(ids[place, scores.argmax()])
            expected.append(previous)
        assert draft.token_ids[slot].tolist() == expected
        changed += sum(a != b for a, b in zip(expected, ids[:, 0].tolist(), strict=True))
    assert changed > 2


@pytest.mark.parametrize("markov", dspark.HEAD_TYPES)
@pytest.mark.parametrize("from_anchor", [True, False])
def test_dspark_drafts_are_those_of_the_formulas(model: Model, markov: str, from_anchor: bool) -> None:
    shape = tiny_block_shape(model)
    head = dspark.HeadShape(markov, 7, True, from_anchor, from_anchor, num_candidates=model.vocab_size)
    names = dspark.tiny_names(shape, head, model.vocab_size, model.vocab_size)
    checkpoint = RandomCheckpoint(names, seed=6)
    weights = checkpoint.tensors
    for name in ("markov_w1", "markov_w2"):
        weights[f"markov_head.{name}.weight"] *= 4.0
    session = running(model, dspark.make(shape, head, setup_for(model), checkpoint))
    assert session.drafter.max_depth == (6 if from_anchor else 5)
    draft = session.propose([5, 0, 5])
    assert draft.confidence is not None
    first = 0 if from_anchor else 1
    w1, w2 = (weights[f"markov_head.{name}.weight"].double() for name in ("markov_w1", "markov_w2"))
    for slot, text in texts_of(session).items():
        hidden = hiddens(model, weights, shape, text, 5 + first)[first:]
        base = base_logits(model, hidden, shape)
        previous, state, expected, confidence = text[-1], torch.zeros(7, dtype=torch.float64), [], []
        for place in range(5):
            seen = w1[previous]
            if markov == "vanilla":
                vector = seen
            elif markov == "gated":
                gate = weights["markov_head.gate_proj.weight"].double() @ torch.cat([hidden[place], seen])
                vector = gate.sigmoid() * seen
            else:
                joint = weights["markov_head.joint_proj.weight"].double() @ torch.cat([state, seen, hidden[place]])
                gate, candidate, out = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                vector = out.tanh()
            features = torch.cat([hidden[place], seen]) if head.confidence_with_markov else hidden[place]
            weight, bias = (weights[f"confidence_head.proj.{part}"].double() for part in ("weight", "bias"))
            confidence.append(float((weight[0] @ features + bias[0]).sigmoid()))
            previous = int((base[place] + w2 @ vector).argmax())
            expected.append(previous)
        assert draft.token_ids[slot].tolist() == expected
        torch.testing.assert_close(draft.confidence[slot], torch.tensor(confidence), rtol=1e-3, atol=1e-4)


def test_dspark_with_a_smaller_vocabulary_and_few_candidates(model: Model) -> None:
    shape, size = tiny_block_shape(model), 40
    head = dspark.HeadShape("vanilla", 7, False, False, True, num_candidates=4)
    checkpoint = RandomCheckpoint(
        {**dspark.tiny_names(shape, head, model.vocab_size, size), "lm_head.weight": (size, model.hidden_size)}
    )
    checkpoint.tensors["d2t"] = torch.arange(size) * 2
    session = running(model, dspark.make(shape, head, setup_for(model), checkpoint))
    draft = session.propose([6, 0, 6])
    weights = checkpoint.tensors
    w1, w2 = (weights[f"markov_head.{name}.weight"].double() for name in ("markov_w1", "markov_w2"))
    for slot, text in texts_of(session).items():
        hidden = hiddens(model, weights, shape, text, 6)
        previous, expected = text[-1], []
        for place in range(6):
            base, ids = (hidden[place] @ weights["lm_head.weight"].double().T).topk(4)
            previous = 3 * int(ids[(base + w2[ids] @ w1[previous]).argmax()])
            expected.append(previous)
        assert draft.token_ids[slot].tolist() == expected


def test_dflash_agrees_with_transformers(model: Model) -> None:
    """The same weights in the assistant class of another library, over one pass without a cache."""
    transformers = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    shape = replace(tiny_block_shape(model), layers=(LayerView(), LayerView()))
    checkpoint = RandomCheckpoint(tiny_block_names(shape), seed=8)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        layer_types=["full_attention"] * 2,
        block_size=6,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=list(shape.layer_outputs),
    )
    reference = transformers.MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    missing = reference.load_state_dict({renamed.get(n, n): t for n, t in checkpoint.tensors.items()}, strict=True)
    assert not missing.missing_keys
    session = running(model, dflash.make(shape, dflash.SelectorShape(), setup_for(model), checkpoint))
    draft = session.propose([5, 0, 5])
    for slot, text in texts_of(session).items():
        outputs = layer_outputs_of(model, text[:-1], shape.layer_outputs)
        ids = torch.tensor([text[-1]] + [shape.mask_token_id] * 5)
        with torch.no_grad():
            found = reference(
                noise_embeds=model.embed(ids)[None],
                context_hidden_states=torch.cat([outputs[layer] for layer in shape.layer_outputs], -1)[None],
                position_ids=torch.arange(len(text) + 5)[None],
            )
        assert draft.token_ids[slot].tolist() == model.logits(found.last_hidden_state[0, 1:]).argmax(-1).tolist()


INNER: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "rope_theta": 10000.0,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 5},
}


def shape_of(**changes: Any) -> BlockShape:
    return read_block_shape(BlockConfig({**INNER, **changes}), 64, 72)


def test_conventions_of_the_configs() -> None:
    assert shape_of().layer_outputs == (1, 16, 31, 46, 61)
    assert shape_of(target_layer_ids=[5, 9]).layer_outputs == (5, 9)
    assert shape_of(aux_hidden_state_layer_ids=[5, 9]).layer_outputs == (4, 8)
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    windowed = {"layer_types": kinds, "sliding_window": 2048}
    assert shape_of().layers == (LayerView(),) * 5
    assert shape_of(**windowed).layers == (LayerView(2048, True),) * 4 + (LayerView(),)
    assert shape_of(**windowed, is_causal=False).layers == (LayerView(2048),) * 4 + (LayerView(),)
    assert shape_of(**windowed, sliding_window_non_causal=True).layers[0] == LayerView(2048, False)
    dflash_config = {"mask_token_id": 5, "use_swa": True, "swa_window_size": 64}
    assert shape_of(dflash_config=dflash_config).layers == (LayerView(64, False),) * 5
    assert shape_of(dflash_config={**dflash_config, "causal": True}, is_causal=False).layers[0] == LayerView(64, False)
    head = dspark.read_head_shape(BlockConfig({"markov_rank": 256, "sample_from_anchor": False}))
    assert not head.sample_from_anchor and head.markov == "vanilla" and head.confidence
    assert dspark.read_head_shape(BlockConfig({"dspark_markov_rank": 256})).sample_from_anchor


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"target_layer_ids": [5, 64]}, "target_layer_ids"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window"),
        ({"block_size": 17}, "block_size"),
        ({"dflash_config": {}}, "mask_token_id"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size"),
        ({"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_settings_that_do_not_fit_are_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        shape_of(**change)


def test_faults_of_the_checkpoint_are_named(model: Model) -> None:
    setup = setup_for(model)
    shape = tiny_block_shape(model, conv_taps=2)
    head = dspark.HeadShape("rnn", 7, True, True, True)
    names = dspark.tiny_names(shape, head, model.vocab_size, model.vocab_size)
    for name in names:
        with pytest.raises(ValueError, match=name.split(".")[-2]):
            dspark.make(shape, head, setup, RandomCheckpoint({n: size for n, size in names.items() if n != name}))
    with pytest.raises(ValueError, match="surplus"):
        dspark.make(shape, head, setup, RandomCheckpoint({**names, "surplus.weight": (2, 2)}))
    selector = dflash.SelectorShape(4, 4)
    for name in dflash.tiny_selector_names(selector, model):
        with pytest.raises(ValueError, match=name.split(".")[1]):
            rest = {**tiny_block_names(shape), **dflash.tiny_selector_names(selector, model)}
            del rest[name]
            dflash.make(shape, selector, setup, RandomCheckpoint(rest))
    with pytest.raises(ValueError, match="mask_token_id"):
        dflash.make(replace(shape, mask_token_id=10**6), dflash.SelectorShape(), setup, RandomCheckpoint(names))
    with pytest.raises(ValueError, match="width"):
        dflash.make(replace(shape, hidden_size=8), dflash.SelectorShape(), setup, RandomCheckpoint(names))
    with pytest.raises(ValueError, match="folder"):
        dflash.build(setup)
    with pytest.raises(ValueError, match="folder"):
        dspark.build(setup)
    plain = tiny_block_shape(model)
    copies = {"embed_tokens.weight": (model.vocab_size, 72), "lm_head.weight": (model.vocab_size, 72)}
    drafter = dflash.make(plain, dflash.SelectorShape(), setup, RandomCheckpoint({**tiny_block_names(plain), **copies}))
    assert drafter.needs == HiddenNeeds(layer_outputs=(0, 2))
