"""DSpark: the block backbone, then a small head that walks from left to right, and an estimate of acceptance.

The head adds to each position's logits a bias that depends on the token chosen before it (W2 W1[previous], in three
forms); here on the best candidates only, which spares reading all of W2 for every token. The confidence head gives
P(accepted | all before accepted). With `sample_from_anchor` a row guesses the position behind its own, so a block of B
rows gives B drafts; without, as in DFlash, B - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter, DrafterSetup
from localspec.drafters._block_backbone import BlockBackbone
from localspec.drafters._block_shape import BlockConfig, BlockShape, read_block_shape
from localspec.drafters._block_tiny import tiny_block_names, tiny_block_shape
from localspec.drafters._drawing import NUM_CANDIDATES, Candidates, Drawer, DrawnRows, finished_draft
from localspec.drafters._tiny import RandomCheckpoint
from localspec.drafters._waiting import Block
from localspec.formats import Checkpoint
from localspec.formats.checkpoint import read_config
from localspec.kernels.ops import Ops
from localspec.layers.linear import check_shape, load_vector

needs_weights = True
HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class HeadShape:
    """markov: one of HEAD_TYPES; confidence: whether there is a confidence head, and whether it sees W1[previous]."""

    markov: str
    rank: int
    confidence: bool
    confidence_with_markov: bool
    sample_from_anchor: bool
    num_candidates: int = NUM_CANDIDATES


def read_head_shape(config: BlockConfig) -> HeadShape:
    """Raises ValueError for what is missing or not supported."""
    markov = config.get("markov_head_type", "vanilla")
    if markov not in HEAD_TYPES:
        raise ValueError(f"config.json: markov_head_type {markov!r} is not supported; there are {HEAD_TYPES}")
    return HeadShape(
        markov=markov,
        rank=config.integer("markov_rank"),
        confidence=bool(config.get("enable_confidence_head", True)),
        confidence_with_markov=bool(config.get("confidence_head_with_markov", True)),
        sample_from_anchor=bool(config.get("sample_from_anchor", True)),
    )


class SequentialHead:
    """Markov head and confidence head; both compute in float32."""

    def __init__(self, shape: HeadShape, backbone: BlockBackbone, ops: Ops, checkpoint: Checkpoint) -> None:
        """Raises ValueError for missing or misshapen tensors."""
        self._shape = shape
        at, hidden = f"{backbone.prefix}markov_head.", backbone.shape.hidden_size
        self._w1 = _table(checkpoint, f"{at}markov_w1.weight", (backbone.vocab_size, shape.rank), ops)
        self._w2 = _table(checkpoint, f"{at}markov_w2.weight", (backbone.draft_vocab_size, shape.rank), ops)
        joined = {"vanilla": None, "gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}[shape.markov]
        self._joint: Tensor | None = None
        self._joint_bias: Tensor | None = None
        if joined is not None:
            name, rows, columns = joined
            size = (rows * shape.rank, columns * shape.rank + hidden)
            self._joint = _table(checkpoint, f"{at}{name}.weight", size, ops).to(torch.float32)
            if checkpoint.has(f"{at}{name}.bias"):
                self._joint_bias = load_vector(ops, checkpoint, f"{at}{name}.bias", (size[0],))
        self._confidence: tuple[Tensor, Tensor] | None = None
        if shape.confidence:
            at = f"{backbone.prefix}confidence_head.proj."
            width = hidden + (shape.rank if shape.confidence_with_markov else 0)
            weight = _table(checkpoint, f"{at}weight", (1, width), ops).to(torch.float32)
            self._confidence = weight, load_vector(ops, checkpoint, f"{at}bias", (1,))

    def start(self, num_slots: int, device: torch.device) -> Tensor:
        """The state carried from position to position (rnn), [S, r] float32."""
        return torch.zeros(num_slots, self._shape.rank, device=device)

    def embed(self, previous: Tensor) -> Tensor:
        """previous [S] int64 target ids -> W1[previous] [S, r] float32."""
        return self._w1[previous].to(torch.float32)

    def bias(self, previous: Tensor, hidden: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """previous [S, r] float32, hidden [S, D], carried [S, r] -> what W2 multiplies [S, r], and the new state."""
        if self._joint is None:
            return previous, carried
        hidden = hidden.to(torch.float32)
        if self._shape.markov == "gated":
            gate = torch.nn.functional.linear(torch.cat([hidden, previous], 1), self._joint, self._joint_bias)
            return gate.sigmoid() * previous, carried
        joined = torch.cat([carried, previous, hidden], 1)
        gate, candidate, output = torch.nn.functional.linear(joined, self._joint, self._joint_bias).chunk(3, dim=1)
        gate = gate.sigmoid()
        carried = gate * carried + (1 - gate) * candidate.tanh()
        return output.tanh(), carried

    def score(self, found: Candidates, places: Tensor, vector: Tensor) -> Candidates:
        """Add W2 vector to the candidates. places: [S, n] their ids in the draft's vocabulary; vector [S, r]."""
        rows = self._w2[places].to(torch.float32)
        return Candidates(found.scores + torch.bmm(rows, vector[:, :, None])[:, :, 0], found.ids)

    def confidence(self, hidden: Tensor, previous: Tensor, fallback: Tensor) -> Tensor:
        """P(accepted) [S] float32, or `fallback` without a confidence head."""
        if self._confidence is None:
            return fallback
        weight, bias = self._confidence
        seen = hidden.to(torch.float32)
        if self._shape.confidence_with_markov:
            seen = torch.cat([seen, previous], dim=1)
        return torch.nn.functional.linear(seen, weight, bias)[:, 0].sigmoid()


class DSparkDrafter:
    """Meets `Drafter`."""

    name = "dspark"
    origins: tuple[str, ...] = ("dspark",)

    loses_rows = True

    def __init__(
        self, backbone: BlockBackbone, head: SequentialHead, shape: HeadShape, drawer: Drawer, fingerprint: str
    ) -> None:
        self._backbone, self._head, self._shape, self._drawer = backbone, head, shape, drawer
        self._first_row = 0 if shape.sample_from_anchor else 1
        self.max_depth = min(backbone.shape.block_size, 15) - self._first_row
        self.needs = HiddenNeeds(layer_outputs=backbone.shape.layer_outputs)
        self.cache_spec = CacheSpec(self.name, fingerprint, backbone.planes)

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """One pass of the backbone, then the head from left to right."""
        count = min(depths.max_depth, self.max_depth)
        if not count:
            return finished_draft([], [], state.lengths > 0, depths, self.origins)
        ready = self._backbone.catch_up(depths, state, cache)
        block = self._backbone.block(depths, extra_rows=self._first_row)
        hidden = self._backbone.run(block, depths, state, cache)
        tokens, scores = self._walk(block, hidden, count, (state, depths.sampled))
        allowed = Depths(torch.minimum(depths.depths, block.counts - self._first_row), depths.max_depth, (), ())
        return finished_draft(tokens, scores, ready, allowed, self.origins)

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Keep keys and values of the committed rows."""
        self._backbone.observe(rows, forward, state, cache)

    @torch.inference_mode()
    def catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> None:
        """See `Waiter`."""
        self._backbone.catch_up(depths, state, cache)

    def forget(self, slot: int) -> None:
        """What waits belongs to another text."""
        self._backbone.forget(slot)

    def _walk(
        self, block: Block, hidden: Tensor, count: int, asked: tuple[SequenceState, bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """hidden [R, D] -> `count` tokens [S] and confidences [S]. asked: the sequences, and whether some sample."""
        state, sampled = asked
        logits = self._backbone.logits(hidden)
        best = logits.topk(min(self._shape.num_candidates, logits.shape[1]), dim=1)
        all_ids = best.indices if self._drawer.id_map is None else self._drawer.id_map[best.indices]
        parts = (best.values, best.indices, all_ids, hidden)
        unary, places, ids, hidden = (block.by_slot(part, self._first_row, count) for part in parts)
        previous = state.history.gather(1, (state.lengths - 1).clamp(min=0)[:, None])[:, 0]
        carried = self._head.start(hidden.shape[0], hidden.device)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for column in range(count):
            embedded = self._head.embed(previous)
            vector, carried = self._head.bias(embedded, hidden[:, column], carried)
            found = Candidates(unary[:, column], ids[:, column])
            found = self._head.score(found, places[:, column], vector)
            previous, share = self._drawer.choose(found, DrawnRows(state, state.lengths + column, sampled))
            tokens.append(previous)
            scores.append(self._head.confidence(hidden[:, column], embedded, share))
        return tokens, scores


def _table(checkpoint: Checkpoint, name: str, size: tuple[int, int], ops: Ops) -> Tensor:
    """A matrix whose rows are looked up, in the activation dtype whatever its stored form."""
    weight = check_shape(checkpoint.weight(name), name, size)
    return weight.dequantise().to(ops.device, ops.activation_dtype)


def make(
    shape: BlockShape, head: HeadShape, setup: DrafterSetup, checkpoint: Checkpoint, greedy: bool = False
) -> Drafter:
    """The drafter from its checkpoint. Raises ValueError naming tensors that are missing, misshapen or left over."""
    backbone = BlockBackbone(shape, setup.model, setup.ops, checkpoint, setup.num_slots)
    sequential = SequentialHead(head, backbone, setup.ops, checkpoint)
    unused = () if head.confidence else (f"{backbone.prefix}confidence_head.",)
    checkpoint.finish((*backbone.shared_names, *unused))
    return DSparkDrafter(backbone, sequential, head, Drawer(backbone.id_map, greedy), checkpoint.fingerprint)


def build(setup: DrafterSetup) -> Drafter:
    """The drafter of a folder. Raises ValueError if it does not fit the target."""
    if setup.checkpoint is None or setup.folder is None:
        raise ValueError("dspark needs the folder of a DSpark checkpoint")
    config = BlockConfig(read_config(setup.folder))
    shape = read_block_shape(config, setup.model.num_layers, setup.model.hidden_size)
    return make(shape, read_head_shape(config), setup, setup.checkpoint)


def tiny(setup: DrafterSetup) -> Drafter:
    """A random drafter with a gated Markov head and a confidence head."""
    shape = tiny_block_shape(setup.model)
    head = HeadShape("gated", 6, confidence=True, confidence_with_markov=True, sample_from_anchor=True)
    vocab_size = setup.model.vocab_size
    return make(shape, head, setup, RandomCheckpoint(tiny_names(shape, head, vocab_size, vocab_size)))


def tiny_names(
    shape: BlockShape, head: HeadShape, vocab_size: int, draft_vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of backbone and heads."""
    rank, hidden = head.rank, shape.hidden_size
    names = tiny_block_names(shape)
    names["markov_head.markov_w1.weight"] = (vocab_size, rank)
    names["markov_head.markov_w2.weight"] = (draft_vocab_size, rank)
    if head.markov == "gated":
        names["markov_head.gate_proj.weight"] = (rank, hidden + rank)
    if head.markov == "rnn":
        names["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
    if head.confidence:
        names["confidence_head.proj.weight"] = (1, hidden + (rank if head.confidence_with_markov else 0))
        names["confidence_head.proj.bias"] = (1,)
    return names
