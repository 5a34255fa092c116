"""A separate small model drafts, with the same vocabulary as the target or another one.

It reads prompts in `observe` and the tokens of an answer in `propose`, from where it stopped last (in its own
vocabulary, token by token, so that positions agree), and goes on from the newest one. So it costs nothing while another
method drafts, and catches up when it is asked again. With a foreign vocabulary only tokens that spell the same bytes
are ever drafted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import MAX_PASS_ROWS, Depths, Drafter, DrafterSetup
from localspec.drafters._drawing import Drawer, DrawnRows, finished_draft
from localspec.drafters._tiny import RandomCheckpoint, attention_shapes, mlp_shapes
from localspec.drafters._vocabulary import VocabularyMap, compare, read_spellings
from localspec.drafters._waiting import Block
from localspec.formats.checkpoint import read_config
from localspec.kernels.ops import Ops
from localspec.models import Model, architecture

needs_weights = True
MAX_DEPTH = 15


class ModelDrafter:
    """Meets `Drafter`."""

    name = "draft_model"
    origins: tuple[str, ...] = ("draft_model",)
    max_depth = MAX_DEPTH
    needs = HiddenNeeds()
    loses_rows = False

    def __init__(self, model: Model, vocabulary: VocabularyMap | None, ops: Ops, num_slots: int, greedy: bool) -> None:
        """Raises ValueError for a model with recurrent state, which could not take back a refused draft."""
        device = ops.device
        if model.cache_spec.states:
            raise ValueError("a model with recurrent state cannot draft; take one with attention layers only")
        self._model, self._ops = model, ops
        self._to_draft = None if vocabulary is None else vocabulary.target_to_draft.to(device)
        to_target = None if vocabulary is None else vocabulary.draft_to_target.to(device)
        self._drawer = Drawer(to_target, greedy, has_holes=True)
        self.cache_spec = replace(model.cache_spec, owner=self.name)
        # Tokens that were read, or were in the cache before the sequence was seen; -1 for a new sequence.
        self._read = torch.full((num_slots,), -1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """Read what waits, at most MAX_PASS_ROWS tokens, and go on; a slot that is not caught up waits."""
        if not depths.max_depth:
            return finished_draft([], [], state.lengths > 0, depths, self.origins)
        hidden, ready = self._catch_up(depths, state, cache)
        newest = (state.lengths - 1).clamp(min=0)
        tokens: list[Tensor] = []
        confidence: list[Tensor] = []
        for column in range(min(depths.max_depth, self.max_depth)):
            if column:
                runs = ready & (depths.depths > column)
                rows = self._rows(tokens[-1], newest + column, runs, depths, state)
                hidden = self._model.forward(rows, cache, self.needs).hidden
            asked = DrawnRows(state, state.lengths + column, depths.sampled)
            token, certainty = self._drawer.draw(self._ops, self._model.logits(hidden), asked)
            tokens.append(token)
            confidence.append(certainty)
        return finished_draft(tokens, confidence, ready, depths, self.origins)

    @torch.inference_mode()
    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Read the rows of a prompt; of an answer only note where its first window begins."""
        if rows.kind == "verify":
            # What lies before the first window of a sequence was in the cache already.
            first = rows.positions[rows.window_starts.clamp(max=rows.positions.shape[0] - 1)]
            self._read.copy_(torch.where((self._read < 0) & (rows.window_rows > 0), first, self._read))
            return
        slots = rows.slots.clamp(min=0)
        committed = (rows.slots >= 0) & (rows.positions + 1 < state.lengths[slots])
        kept = replace(rows, token_ids=self._own(rows.token_ids), slots=torch.where(committed, rows.slots, -1))
        self._model.forward(kept, cache, self.needs)
        self._read.scatter_reduce_(0, slots, torch.where(committed, rows.positions + 1, -1), "amax")

    @torch.inference_mode()
    def catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> None:
        """See `Waiter`; the text itself waits, so nothing is ever lost."""
        self._catch_up(depths, state, cache)

    def forget(self, slot: int) -> None:
        """The slot was given to another sequence."""
        self._read[slot].fill_(-1)

    def _catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> tuple[Tensor, Tensor]:
        """Run the oldest unread tokens, the newest one always among those of a slot that is caught up.

        Returns [S, D] the hidden of each slot's last row that ran, and [S] bool whether that is its newest token.
        """
        newest = state.lengths - 1
        begin = torch.where(self._read < 0, newest, torch.minimum(self._read, newest))
        asked = (depths.depths > 0) & (newest >= 0)
        block = Block.of(torch.where(asked, state.lengths - begin, 0), MAX_PASS_ROWS)
        slots = block.slots.clamp(min=0)
        positions = (begin[slots] + block.offsets).clamp(min=0)
        rows = Rows(
            kind="verify",
            token_ids=self._own(state.history[slots, positions]),
            positions=positions,
            slots=block.slots,
            block_tables=state.block_tables,
            lengths=state.lengths,
            window_starts=block.starts,
            window_rows=block.counts,
            pending_rows=torch.zeros_like(state.pending_rows),
            max_position_bound=max(depths.length_bounds, default=1) + depths.max_depth,
            slot_rows_bound=positions.shape[0],
        )
        hidden = self._model.forward(rows, cache, self.needs).hidden
        self._read.copy_(torch.where(block.counts > 0, begin + block.counts, self._read))
        last = (block.starts + block.counts - 1).clamp(0, MAX_PASS_ROWS - 1)
        return hidden[last], asked & (begin + block.counts == state.lengths)

    def _own(self, token_ids: Tensor) -> Tensor:
        """Target ids -> ids that this model reads."""
        token_ids = token_ids.clamp(min=0)
        if self._to_draft is None:
            return token_ids.clamp(max=self._model.vocab_size - 1)
        return self._to_draft[token_ids]

    def _rows(self, token_ids: Tensor, positions: Tensor, runs: Tensor, depths: Depths, state: SequenceState) -> Rows:
        """One row a slot; slots that do not run become padding."""
        slots = torch.arange(runs.shape[0], device=runs.device)
        return Rows(
            kind="verify",
            token_ids=self._own(token_ids),
            positions=positions,
            slots=torch.where(runs, slots, -1),
            block_tables=state.block_tables,
            lengths=state.lengths,
            window_starts=slots,
            window_rows=runs.to(torch.int64),
            pending_rows=torch.zeros_like(state.pending_rows),
            max_position_bound=max(depths.length_bounds, default=1) + depths.max_depth,
            slot_rows_bound=1,
        )


def make(model: Model, vocabulary: VocabularyMap | None, setup: DrafterSetup, greedy: bool = False) -> Drafter:
    """The drafter around a loaded model. Raises ValueError if it cannot draft for the target."""
    if vocabulary is None and model.vocab_size > setup.model.vocab_size:
        raise ValueError(
            f"the draft has {model.vocab_size} tokens and the target {setup.model.vocab_size}; "
            "their tokenizers are needed to compare them"
        )
    return ModelDrafter(model, vocabulary, setup.ops, setup.num_slots, greedy)


def build(setup: DrafterSetup) -> Drafter:
    """The model of a folder. With `target_folder` the two tokenizers are compared; without, ids must mean the same.

    Raises ValueError if the model cannot be loaded or has no token in common with the target.
    """
    if setup.checkpoint is None or setup.folder is None:
        raise ValueError("draft_model needs the folder of a small model")
    config = read_config(setup.folder)
    model = architecture(str(config.get("model_type"))).load(config, setup.checkpoint, setup.ops)
    vocabulary = None
    if setup.target_folder is not None:
        sizes = (model.vocab_size, setup.model.vocab_size)
        vocabulary = compare(read_spellings(setup.folder), read_spellings(setup.target_folder), sizes)
    return make(model, vocabulary, setup)


def tiny(setup: DrafterSetup) -> Drafter:
    """A random two-layer model with a vocabulary of its own: every second token of the target, in reverse order."""
    size = setup.model.vocab_size // 2
    hidden, inner, heads, head_dim = 64, 48, 4, 16
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= attention_shapes(f"{at}self_attn.", (hidden, heads * head_dim, 2 * head_dim), hidden)
        shapes |= mlp_shapes(f"{at}mlp.", hidden, inner)
    model = architecture("llama").load(config, RandomCheckpoint(shapes, device=setup.ops.device), setup.ops)
    to_target = torch.arange(size).flip(0) * 2
    to_draft = (size - 1 - torch.arange(setup.model.vocab_size) // 2).clamp(min=0)
    return make(model, VocabularyMap(to_target, to_draft, size), setup)
