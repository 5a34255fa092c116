"""What the training of every kind of drafter shares: its vocabulary, the teacher's law, and the walk that measures.

Acceptance on a greedy answer needs no decoding: as long as a chain of drafts is right, what it reads is the answer
itself, so whether draft k behind position a is right can be told for every a at once; a walk over these then takes the
steps that an engine would take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from localspec.training.answers import AnswerStore, Batch
from localspec.training.target import Hiddens, Target


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: [n] int64 target ids, ascending, that the drafter can say; None: all of them, with the target's own head."""

    ids: Tensor | None
    vocab_size: int

    @classmethod
    def most_used(cls, store: AnswerStore, vocab_size: int, size: int, always: tuple[int, ...] = ()) -> DraftVocabulary:
        """The `size` tokens that the training answers use most, and those of `always`."""
        counts = torch.from_numpy(store.counts(vocab_size))
        counts[list(always)] = counts.max() + 1
        # Ties go to the lower id, so that the choice depends on nothing else.
        order = torch.sort(counts, descending=True, stable=True).indices[: min(size, vocab_size)]
        return cls(order.sort().values, vocab_size)

    @property
    def size(self) -> int:
        return self.vocab_size if self.ids is None else self.ids.shape[0]

    @property
    def offsets(self) -> Tensor:
        """[n] int64: what the layouts call d2t."""
        assert self.ids is not None
        return self.ids - torch.arange(self.size)

    @property
    def is_said(self) -> Tensor:
        """[V] bool: what the layouts call t2d."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids if self.ids is not None else slice(None)] = True
        return mask


@dataclass(frozen=True)
class DrafterSizes:
    """Sizes of a drafter's layers, under the names that all layouts share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_context_tokens: int

    def as_config(self) -> dict[str, Any]:
        """Keys of config.json."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_context_tokens,
        }


@dataclass(frozen=True)
class Loss:
    """value: scalar to minimise; parts: scalars for the log."""

    value: Tensor
    parts: Mapping[str, Tensor]


class Teacher:
    """The target's law over the draft's vocabulary at the rows that are to be guessed."""

    def __init__(self, target: Target, vocabulary: DraftVocabulary) -> None:
        ids = None if vocabulary.ids is None else vocabulary.ids.to(target.device)
        self._head = target.head_rows(ids)
        self.ids = ids
        said = vocabulary.is_said.to(target.device)
        self._said = said
        self.to_draft = torch.cumsum(said, 0) - 1
        """[V] int64 draft id of each target id that is said."""
        self.sharpness = 1.0
        """The law is raised to this power: above 1, its first choice counts for more."""

    @torch.no_grad()
    def law(self, batch: Batch, hiddens: Hiddens, label_rows: Tensor) -> Tensor:
        """[N, n] probabilities for the tokens at label_rows [N] of the flattened batch, in the hiddens' dtype."""
        rows = hiddens.final.flatten(0, 1)[label_rows - 1]
        logits = torch.nn.functional.linear(rows, self._head)
        return (logits * self.sharpness).softmax(dim=-1, dtype=torch.float32).to(hiddens.final.dtype)

    def weights(self, labels: Tensor) -> Tensor:
        """[N] float32: 0 for tokens that the draft cannot say, else 1."""
        return self._said[labels].float()

    def are_said(self, drafts: Tensor, tokens: Tensor) -> Tensor:
        """Whether draft ids [...] are the target's tokens [...]."""
        return (drafts if self.ids is None else self.ids[drafts]) == tokens


class TrainableDrafter(Protocol):
    """What differs between kinds of drafters. `module` holds the parameters under their checkpoint names."""

    kind: str
    layer_outputs: tuple[int, ...]
    module: nn.Module
    prefix: str
    """What stands before the parameters' names in a file."""
    vocabulary: DraftVocabulary
    teacher: Teacher
    config: dict[str, Any]
    """config.json in the standard layout of its kind, without the form of the weights."""

    def fit_inputs(self, hiddens: Hiddens) -> None:
        """Choose the units in which the target's hiddens are read, from examples. Before training, once."""
        ...

    def loss(self, batch: Batch, hiddens: Hiddens, generator: torch.Generator) -> Loss:
        """Of one batch; what is drawn at random comes from the generator (host)."""
        ...

    def matches(self, batch: Batch, hiddens: Hiddens, depth: int) -> Tensor:
        """[B, T, depth] bool: whether draft k behind the newest token at j is tokens[j + 1 + k], the ones before it
        being right."""
        ...


def start_from_target(target: Target, teacher: Teacher, into: tuple[Tensor, Tensor, Tensor], norm_share: float) -> None:
    """Let a drafter begin as the target ends.

    into: its head [n, D], its final norm [D] (`norm_share` of the target's), and its projection of the target's hiddens
    [D, n * target width], through which the last of them passes as it is.
    """
    head, norm, projection = into
    with torch.no_grad():
        head.copy_(target.head_rows(teacher.ids))
        norm.copy_(norm_share * target.norm_scale())
        projection[:, -target.hidden_size :] += torch.eye(projection.shape[0], target.hidden_size)


@torch.no_grad()
def chain_matches(
    teacher: Teacher, tokens: Tensor, outputs: Sequence[Tensor], logits: Callable[[Tensor], Tensor]
) -> Tensor:
    """`TrainableDrafter.matches` of a chain. tokens: [B, T]; outputs: for each draft the hiddens [B, T, D] of the rows
    that began at i; the chain behind the newest token j began at j - 1."""
    found = torch.zeros(*tokens.shape, len(outputs), dtype=torch.bool, device=tokens.device)
    for step, hidden in enumerate(outputs):
        usable = tokens.shape[1] - step - 2
        if usable > 0:
            drafts = logits(hidden[:, :usable]).argmax(dim=-1)
            found[:, 1 : 1 + usable, step] = teacher.are_said(drafts, tokens[:, step + 2 :])
    return found


def soft_loss(logits: Tensor, law: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy [N, n] against the teacher's law [N, n], weighted by [N], mean over all rows."""
    return _SoftLoss.apply(logits, law, weights)  # type: ignore[no-untyped-call, no-any-return]


class _SoftLoss(torch.autograd.Function):
    """Keeps nothing of the size of the logits but themselves: several steps of a chain stand in memory together."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, law: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(logits, law, weights)
        mass = law.sum(dim=1, dtype=torch.float32)
        losses = mass * logits.float().logsumexp(dim=1) - (logits * law).sum(dim=1, dtype=torch.float32)
        return (losses * weights).sum() / max(1, losses.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, law, weights = ctx.saved_tensors
        found = logits.softmax(dim=1, dtype=torch.float32).sub_(law)
        found.mul_((gradients[0] * weights / max(1, logits.shape[0]))[:, None])
        return found.to(logits.dtype), None, None


@dataclass
class Tally:
    """Steps of walks and what they accepted."""

    steps: int = 0
    accepted: int = 0
    reached: list[int] | None = None
    """Steps in which draft k was accepted, for each k."""

    @property
    def length(self) -> float:
        """Mean tokens a step: the accepted drafts and the target's own."""
        return 1 + self.accepted / max(1, self.steps)

    @property
    def per_position(self) -> list[float]:
        return [round(count / max(1, self.steps), 4) for count in self.reached or []]


def walk(matches: Tensor, batch: Batch, tally: Tally) -> None:
    """Take an engine's greedy steps over the answers of a batch. matches: [B, T, depth] bool."""
    accepted = matches.to(torch.int64).cumprod(dim=2).sum(dim=2).cpu().tolist()
    depth = matches.shape[2]
    tally.reached = tally.reached or [0] * depth
    starts, ends = batch.answer_from.tolist(), batch.ends.tolist()
    for row, start in enumerate(starts):
        newest = start
        while newest < ends[row] - 1:
            count = min(accepted[row][newest], ends[row] - 1 - newest)
            tally.steps += 1
            tally.accepted += count
            for place in range(count):
                tally.reached[place] += 1
            newest += count + 1
