"""Where a block drafter's first layer looks before it has learnt anything."""

from __future__ import annotations

import pytest
import torch

from localspec.drafters._block_shape import BlockShape, LayerView
from localspec.training.block_net import BlockModule, look_back
from localspec.training.drafting import DraftVocabulary
from localspec.training.parts import in_heads, initialise, rotate

pytestmark = pytest.mark.torch

HIDDEN, HEAD_DIM, PLACES = 192, 64, 40


def shape_of(num_heads: int, num_kv_heads: int) -> BlockShape:
    inv_freq = 100000.0 ** -torch.arange(0, 1, 2 / HEAD_DIM)
    return BlockShape(
        HIDDEN, HIDDEN, 32, num_heads, num_kv_heads, HEAD_DIM, 1e-5, inv_freq, (LayerView(causal=True),), (0,), 8, 1
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_rows"), [(3, 3, 5), (3, 1, 3), (4, 2, 5)])
def test_rows_begin_with_the_newest_context(num_heads: int, num_kv_heads: int, num_rows: int) -> None:
    """Keys of one head look one way alone, which is sharp for the first rows of a block only."""
    shape = shape_of(num_heads, num_kv_heads)
    net = BlockModule(shape, DraftVocabulary(None, 50), 0)
    initialise(net, 3)
    generator = torch.Generator().manual_seed(5)
    middle = torch.randn(2, HIDDEN, generator=generator)
    context = middle[0] + torch.randn(300, HIDDEN, generator=generator)
    newest = middle[1] + torch.randn(50, HIDDEN, generator=generator)
    mask = torch.randn(1, HIDDEN, generator=generator)
    look_back(net, shape, context, newest, mask)
    layer = net.layer(0)
    part = layer.self_attn
    rows = layer.input_layernorm.norm(torch.cat([newest[:1], mask.expand(num_rows - 1, -1)]))
    seen = torch.cat([context[:PLACES], rows])
    places = torch.arange(PLACES + num_rows)[None]
    with torch.no_grad():
        q = rotate(
            part.q_norm.norm(in_heads(part.q_proj.multiply(rows), HEAD_DIM))[None], places[:, PLACES:], shape.inv_freq
        )
        k = rotate(part.k_norm.norm(in_heads(part.k_proj.multiply(seen), HEAD_DIM))[None], places, shape.inv_freq)
        k = k.repeat_interleave(num_heads // num_kv_heads, dim=2)
        scores = torch.einsum("bqhd,bkhd->hqk", q, k) / HEAD_DIM**0.5
        for row in range(num_rows):
            weights = scores[:, row, : PLACES + row + 1].softmax(dim=1)
            # At least one head of all finds it, and none looks at the block itself.
            assert weights[:, PLACES - 1].max() > 0.5, row
            assert weights[:, PLACES:].sum(dim=1).max() < 0.2, row
        # What is passed on is the part of it in which contexts differ most.
        value = in_heads(part.v_proj.multiply(context[PLACES - 1]), HEAD_DIM)
        passed = part.o_proj.multiply(value.repeat_interleave(num_heads // num_kv_heads, dim=0).flatten())
    likeness = torch.cosine_similarity(passed, context[PLACES - 1], dim=0)
    assert likeness > (0.9 if num_kv_heads * HEAD_DIM >= HIDDEN else 0.6)
