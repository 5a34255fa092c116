"""DFlash: a block of masks behind the newest token, every position guessed at once from the target's own hiddens.

DFlash2 adds a convolution inside the block (see the shared backbone) and a selector that walks through the best
candidates of neighbouring positions instead of choosing each on its own. A block of B rows gives B - 1 drafts.
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
from localspec.drafters._drawing import Candidates, Drawer, DrawnRows, finished_draft
from localspec.drafters._tiny import RandomCheckpoint
from localspec.drafters._waiting import Block
from localspec.formats import Checkpoint
from localspec.formats.checkpoint import read_config
from localspec.kernels.ops import Ops
from localspec.layers.linear import check_shape
from localspec.models import Model

needs_weights = True


@dataclass(frozen=True)
class SelectorShape:
    """rank 0: no selector."""

    rank: int = 0
    num_candidates: int = 0


class Selector:
    """Scores candidates c of a position by unary[c] + <predecessor[previous] * projection(hidden), successor[c]>."""

    def __init__(self, shape: SelectorShape, model: Model, ops: Ops, checkpoint: Checkpoint, prefix: str = "") -> None:
        """Raises ValueError for missing or misshapen tensors."""
        at = f"{prefix}candidate_selector."
        self.num_candidates, self.rank, self._ops = shape.num_candidates, shape.rank, ops

        def table(name: str) -> Tensor:
            found = checkpoint.vector(f"{at}{name}")
            if tuple(found.shape) != (model.vocab_size, shape.rank):
                raise ValueError(f"{at}{name} has shape {tuple(found.shape)}, not {(model.vocab_size, shape.rank)}")
            return found.to(ops.device, ops.activation_dtype)

        self._predecessor, self._successor = table("predecessor_codebook"), table("successor_codebook")
        name = f"{at}hidden_projection.weight"
        size = (shape.rank, model.hidden_size)
        self._projection = ops.pack([check_shape(checkpoint.weight(name), name, size)])

    def contexts(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, r]."""
        return self._ops.linear(hidden, self._projection)

    def score(self, found: Candidates, context: Tensor, previous: Tensor) -> Candidates:
        """context [S, r], previous [S] int64 target ids -> the same candidates with the transition added."""
        gate = (self._predecessor[previous] * context)[:, :, None].to(torch.float32)
        transition = torch.bmm(self._successor[found.ids].to(torch.float32), gate)[:, :, 0]
        return Candidates(found.scores + transition, found.ids)


class DFlashDrafter:
    """Meets `Drafter`."""

    name = "dflash"
    origins: tuple[str, ...] = ("dflash",)

    loses_rows = True

    def __init__(self, backbone: BlockBackbone, selector: Selector | None, drawer: Drawer, fingerprint: str) -> None:
        self._backbone, self._selector, self._drawer = backbone, selector, drawer
        self.max_depth = backbone.shape.block_size - 1
        self.needs = HiddenNeeds(layer_outputs=backbone.shape.layer_outputs)
        self.cache_spec = CacheSpec(self.name, fingerprint, backbone.planes)

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """One pass over a block as wide as the deepest slot asks for."""
        count = min(depths.max_depth, self.max_depth)
        if not count:
            return finished_draft([], [], state.lengths > 0, depths, self.origins)
        ready = self._backbone.catch_up(depths, state, cache)
        block = self._backbone.block(depths, extra_rows=1)
        hidden = self._backbone.run(block, depths, state, cache)
        logits = self._backbone.logits(hidden)  # [R, n]
        slots = block.slots.clamp(min=0)
        asked = DrawnRows(state, state.lengths[slots] - 1 + block.offsets, depths.sampled, slots)
        if self._selector is None:
            # Row 0 of a block is the newest token, which is known; its draw is thrown away.
            drawn = self._drawer.draw(self._backbone.ops, logits, asked)
            tokens, scores = (list(block.by_slot(part, 1, count).unbind(1)) for part in drawn)
        else:
            found = self._drawer.candidates(logits, self._selector.num_candidates)
            tokens, scores = self._walk(self._selector, block, found, hidden, (count, asked))
        allowed = Depths(torch.minimum(depths.depths, block.counts - 1), depths.max_depth, (), ())
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
        self, selector: Selector, block: Block, found: Candidates, hidden: Tensor, drafts: tuple[int, DrawnRows]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Choose from left to right, each given the choice before it. Returns tokens and scores, [S] each."""
        count, state = drafts[0], drafts[1].state
        unary, ids = block.by_slot(found.scores, 1, count), block.by_slot(found.ids, 1, count)
        contexts = block.by_slot(selector.contexts(hidden), 1, count)
        previous = state.history.gather(1, (state.lengths - 1).clamp(min=0)[:, None])[:, 0]
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for column in range(count):
            here = Candidates(unary[:, column], ids[:, column])
            here = selector.score(here, contexts[:, column], previous)
            asked = DrawnRows(state, state.lengths + column, drafts[1].sampled)
            previous, score = self._drawer.choose(here, asked)
            tokens.append(previous)
            scores.append(score)
        return tokens, scores


def make(
    shape: BlockShape, selector: SelectorShape, setup: DrafterSetup, checkpoint: Checkpoint, greedy: bool = False
) -> Drafter:
    """The drafter from its checkpoint. Raises ValueError naming tensors that are missing, misshapen or left over."""
    backbone = BlockBackbone(shape, setup.model, setup.ops, checkpoint, setup.num_slots)
    chosen = Selector(selector, setup.model, setup.ops, checkpoint, backbone.prefix) if selector.rank else None
    checkpoint.finish(backbone.shared_names)
    return DFlashDrafter(backbone, chosen, Drawer(backbone.id_map, greedy), checkpoint.fingerprint)


def read_selector_shape(config: BlockConfig) -> SelectorShape:
    """The selector's sizes. Raises ValueError for what is no whole number."""
    rank = config.integer("selector_rank", 0)
    return SelectorShape(rank, config.integer("selector_top_k") if rank else 0)


def build(setup: DrafterSetup) -> Drafter:
    """The drafter of a folder. Raises ValueError if it does not fit the target."""
    if setup.checkpoint is None or setup.folder is None:
        raise ValueError("dflash needs the folder of a DFlash checkpoint")
    config = BlockConfig(read_config(setup.folder))
    shape = read_block_shape(config, setup.model.num_layers, setup.model.hidden_size)
    return make(shape, read_selector_shape(config), setup, setup.checkpoint)


def tiny(setup: DrafterSetup) -> Drafter:
    """A random DFlash2 with one windowed and one full layer."""
    shape = tiny_block_shape(setup.model, conv_taps=2)
    selector = SelectorShape(rank=5, num_candidates=6)
    names = {**tiny_block_names(shape), **tiny_selector_names(selector, setup.model)}
    return make(shape, selector, setup, RandomCheckpoint(names))


def tiny_selector_names(selector: SelectorShape, model: Model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the selector's tensors."""
    at = "candidate_selector."
    return {
        f"{at}predecessor_codebook": (model.vocab_size, selector.rank),
        f"{at}successor_codebook": (model.vocab_size, selector.rank),
        f"{at}hidden_projection.weight": (selector.rank, model.hidden_size),
    }
