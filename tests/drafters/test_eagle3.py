"""EAGLE-3 against its formulas in float64, and the conventions in which its two layouts differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localspec.core.records import HiddenNeeds
from localspec.drafters import eagle3
from localspec.drafters._tiny import RandomCheckpoint
from localspec.models import Model
from tests.drafters.float64 import Weights, attend, gated_mlp, project, rms, rope
from tests.drafters.session import Session, layer_outputs_of, random_target, setup_for

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return random_target("llama", tmp_path_factory.mktemp("target"))


def fused(outputs: dict[int, Tensor], weights: Weights, shape: eagle3.Eagle3Shape) -> Tensor:
    parts = [outputs[layer].double() for layer in shape.layer_outputs]
    for names in ([f"fc_norm.{index}.weight" for index in range(3)], [f"{n}.weight" for n in eagle3.LEGACY_NORMS]):
        if names[0] in weights:
            parts = [rms(part, weights[name], shape.norm_eps) for part, name in zip(parts, names, strict=True)]
    joined = torch.cat(parts, -1)
    if shape.norm_before_fc:
        joined = rms(joined, weights["input_norm.weight"], shape.norm_eps)
    return joined @ weights["fc.weight"].double().T


def rows(embedding: Tensor, hidden: Tensor, weights: Weights, shape: eagle3.Eagle3Shape, at: str) -> Tensor:
    """The layer over whole sequences -> [T, D] y + res before the final norm."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, weights[f"{at}{name}.weight"], shape.norm_eps)

    normed = norm(hidden, "hidden_norm")
    wide = torch.cat([norm(embedding, "input_layernorm"), normed], -1)
    positions = torch.arange(len(wide))
    q, k, v = (project(wide, weights, f"{at}self_attn.{part}_proj.weight", shape.head_dim) for part in "qkv")
    visible = positions[:, None] >= positions
    if shape.window:
        visible &= positions[:, None] - positions < shape.window
    mixed = attend(rope(q, positions, shape.inv_freq), rope(k, positions, shape.inv_freq), v, visible)
    x = (normed if shape.norm_before_residual else hidden) + mixed @ weights[f"{at}self_attn.o_proj.weight"].double().T
    return x + gated_mlp(norm(x, "post_attention_layernorm"), weights, f"{at}mlp.")


def expected_chain(
    model: Model, weights: Weights, shape: eagle3.Eagle3Shape, tokens: list[int], depth: int, at: str
) -> tuple[list[int], list[float]]:
    outputs = layer_outputs_of(model, tokens[:-1], shape.layer_outputs)
    hidden, text, drafts, scores = fused(outputs, weights, shape), list(tokens), [], []
    for _ in range(depth):
        embedding = model.embed(torch.tensor(text[1:])).double()
        x = rows(embedding, hidden, weights, shape, at)[-1:]
        normed = rms(x, weights["norm.weight"], shape.norm_eps)
        law = (normed @ weights["lm_head.weight"].double().T)[0].softmax(0)
        best = int(law.argmax())
        drafts.append(best + int(weights["d2t"][best]) if "d2t" in weights else best)
        scores.append(float(law.max()))
        text.append(drafts[-1])
        hidden = torch.cat([hidden, normed if shape.norm_output else x])
    return drafts, scores


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual before the norm": {"norm_before_residual": False},
    "norm before fc, output norm": {"norm_before_fc": True, "norm_output": True},
    "window": {"window": 9},
    "norm for each layer": {},
    "legacy names": {"norm_before_residual": False},
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_drafts_are_those_of_the_formulas(model: Model, variant: str) -> None:
    shape = replace(eagle3.tiny_shape(model), **VARIANTS[variant])
    at = "midlayer." if variant == "legacy names" else "layers.0."
    size = 50
    shapes = eagle3.tiny_shapes(shape, size, at)
    if variant == "norm for each layer":
        shapes |= {f"fc_norm.{index}.weight": (model.hidden_size,) for index in range(3)}
    if variant == "legacy names":
        shapes |= {f"{name}.weight": (model.hidden_size,) for name in eagle3.LEGACY_NORMS}
    checkpoint = RandomCheckpoint(shapes, seed=7)
    checkpoint.tensors["d2t"] = torch.randint(0, 3, (size,), generator=torch.Generator().manual_seed(1)).cumsum(0)
    checkpoint.tensors["d2t"] %= model.vocab_size - size
    checkpoint.tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool)
    session = Session(model, eagle3.make(shape, setup_for(model), checkpoint))
    assert session.drafter.needs == HiddenNeeds(layer_outputs=shape.layer_outputs)
    session.start(0, list(range(3, 80)))
    session.start(3, [5, 9])
    for depth in (3, 7):
        session.step([depth, 0, 0, depth])
        draft = session.propose([7, 0, 0, 5])
        assert draft.confidence is not None
        for slot, wanted in ((0, 7), (3, 5)):
            text = session.state.history[slot, : int(session.state.lengths[slot])].tolist()
            tokens, scores = expected_chain(model, checkpoint.tensors, shape, text, wanted, at)
            assert draft.token_ids[slot, :wanted].tolist() == tokens
            torch.testing.assert_close(draft.confidence[slot, :wanted], torch.tensor(scores), rtol=1e-3, atol=1e-5)


INNER = {
    "hidden_size": 72,
    "intermediate_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def test_conventions_of_the_two_layouts() -> None:
    speculators = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": INNER,
        "draft_vocab_size": 50,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    }
    shape = eagle3.read_shape(speculators, 32, 72)
    assert shape.layer_outputs == (1, 15, 28)  # that layout counts inputs of layers
    assert shape.norm_before_residual and shape.head_dim == 12 and not shape.norm_output
    assert not eagle3.read_shape({**speculators, "norm_before_residual": False}, 32, 72).norm_before_residual
    original = {**INNER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50}
    assert eagle3.read_shape(original, 32, 72).layer_outputs == (1, 15, 28)  # inputs of 2, n / 2, n - 3
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 16, 29], "norm_before_fc": True}
    shape = eagle3.read_shape({**original, "eagle_config": eagle}, 32, 72)
    assert shape.layer_outputs == (2, 16, 29)  # this one counts outputs
    assert shape.norm_before_fc and not shape.norm_before_residual
    sliding = {**INNER, "layer_types": ["sliding_attention"], "sliding_window": 512}
    assert eagle3.read_shape({**speculators, "transformer_layer_config": sliding}, 32, 72).window == 512


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 5, 9]}, "layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 40]}, "layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "layer_ids"),
        ({"transformer_layer_config": {**INNER, "num_hidden_layers": 2}}, "num_hidden_layers"),
        ({"transformer_layer_config": {**INNER, "hidden_size": None}}, "hidden_size"),
        ({"mask_hidden": True}, "parallel"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_settings_that_do_not_fit_are_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        eagle3.read_shape({"transformer_layer_config": INNER, **change}, 32, 72)


def test_faults_of_the_checkpoint_are_named(model: Model) -> None:
    shape = eagle3.tiny_shape(model)
    shapes = eagle3.tiny_shapes(shape, 50)
    for name in shapes:
        if name == "lm_head.weight":
            continue  # then the target's own head serves
        checkpoint = RandomCheckpoint({each: size for each, size in shapes.items() if each != name})
        checkpoint.tensors["d2t"] = torch.zeros(50, dtype=torch.int64)
        with pytest.raises(ValueError, match=name.removeprefix("layers.0.").split(".")[-2]):
            eagle3.make(shape, setup_for(model), checkpoint)
    for offsets, word in ((torch.full((50,), model.vocab_size), "vocabulary"), (torch.zeros(49).long(), "d2t")):
        checkpoint = RandomCheckpoint(shapes)
        checkpoint.tensors["d2t"] = offsets
        with pytest.raises(ValueError, match=word):
            eagle3.make(shape, setup_for(model), checkpoint)
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape"):
        eagle3.make(shape, setup_for(model), RandomCheckpoint(shapes))
    with pytest.raises(ValueError, match="extra"):
        checkpoint = RandomCheckpoint({**shapes, "extra.weight": (2, 2)})
        checkpoint.tensors["d2t"] = torch.zeros(50, dtype=torch.int64)
        eagle3.make(shape, setup_for(model), checkpoint)
    with pytest.raises(ValueError, match="width"):
        eagle3.make(replace(shape, target_hidden_size=8), setup_for(model), RandomCheckpoint(shapes))
    with pytest.raises(ValueError, match="folder"):
        eagle3.build(setup_for(model))
