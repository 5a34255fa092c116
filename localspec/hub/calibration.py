"""Runs a model over a text, teacher forced: what its matrices see, and how far another one's predictions are.

Knows models, back ends and tokenizers; does not know how weights are quantised or where models are installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from localspec.api.types import Sampling
from localspec.cache.pool import CachePool
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS, HiddenNeeds, PrefillPlan, Request
from localspec.formats import Checkpoint
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.hub.calibration_text import CALIBRATION_PROSE, HELD_OUT_PROSE
from localspec.kernels.ops import Norm, Ops, PackedWeight
from localspec.kernels.table import choose
from localspec.kernels.weights import LogicalWeight
from localspec.models import architecture
from localspec.runner.runner import Runner

WINDOW_TOKENS = 256
MAX_CALIBRATION_WINDOWS = 32
MAX_HELD_OUT_WINDOWS = 2
MAX_TEXT_BYTES = 4 << 20
CALIBRATION_MODULES = ("textwrap", "heapq", "fractions", "shlex")
HELD_OUT_MODULES = ("bisect", "colorsys")
HEAD = "lm_head.weight"
_MODULE_CHARACTERS = 6000


@dataclass(frozen=True)
class Texts:
    """Token windows. `source` says in words where the texts come from."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    source: str


@dataclass(frozen=True)
class Agreement:
    """How near predictions are to the source's, over `num_tokens` held-out positions. KL in nats."""

    mean_kl: float
    top_1: float
    num_tokens: int


def read_texts(folder: Path, calibration: Path | None) -> Texts:
    """Windows of a file (its last quarter is held out) or of the built-in text, by the model's own tokenizer.

    Raises ValueError for a text that is too short or no text, or a damaged tokenizer.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a missing or damaged file
        raise ValueError(f"{path} is missing or damaged ({error})") from error

    def windows(text: str) -> list[tuple[int, ...]]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return [tuple(ids[at : at + WINDOW_TOKENS]) for at in range(0, len(ids), WINDOW_TOKENS)]

    if calibration is None:
        fitted = [w for text in (*CALIBRATION_PROSE, *_module_sources(CALIBRATION_MODULES)) for w in windows(text)]
        held = [windows(text)[0] for text in (HELD_OUT_PROSE, *_module_sources(HELD_OUT_MODULES))]
        source = f"built-in prose and the standard library's {', '.join(CALIBRATION_MODULES)}"
        return Texts(tuple(fitted[:MAX_CALIBRATION_WINDOWS]), tuple(held[:MAX_HELD_OUT_WINDOWS]), source)
    found = [window for window in windows(_read_text(calibration)) if len(window) >= 32]
    if len(found) < 2:
        raise ValueError(f"{calibration} is too short: {2 * WINDOW_TOKENS} tokens or more are needed")
    first_held = len(found) - max(1, min(len(found) // 4, MAX_HELD_OUT_WINDOWS))
    fitted = found[:first_held]
    # Spread over the file: its beginning alone may be of one kind.
    stride = -(-len(fitted) // MAX_CALIBRATION_WINDOWS)
    return Texts(tuple(fitted[::stride]), tuple(found[first_held:]), str(calibration))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        # A character that the limit cut in two is no fault of the text.
        if error.start > MAX_TEXT_BYTES - 4:
            return str(error.object[: error.start], "utf-8")
        raise ValueError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def _module_sources(names: Sequence[str]) -> list[str]:
    """Beginnings of modules of the standard library; those that a packaged Python lacks are left out."""
    found = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            found.append(Path(spec.origin).read_text(encoding="utf-8")[:_MODULE_CHARACTERS])
    return found


class TextModel:
    """A loaded model that reads windows of token ids. Raises ValueError for a model that cannot be loaded."""

    def __init__(self, folder: Path, device: str) -> None:
        config = read_config(folder)
        ops, _ = choose(device)
        self._observer = _Observer(ops)
        checkpoint = open_checkpoint(folder)
        try:
            named = cast(Checkpoint, _NamingCheckpoint(checkpoint, self._observer))
            with torch.inference_mode():
                model = architecture(str(config.get("model_type"))).load(config, named, cast(Ops, self._observer))
        finally:
            checkpoint.close()
        num_pages = 2 + WINDOW_TOKENS // PAGE_TOKENS
        self._pages = list(range(1, num_pages))
        pool = CachePool([model.cache_spec], num_pages, MAX_SLOTS, ops.device, num_snapshots=0)
        self._runner = Runner(model, cast(Ops, self._observer), pool, WINDOW_TOKENS, HiddenNeeds())

    @torch.inference_mode()
    def log_probs(self, window: tuple[int, ...]) -> Tensor:
        """[T, V] float32 in host memory: the prediction after each token of a window of at most WINDOW_TOKENS."""
        forward = self._read(window)
        return torch.log_softmax(self._runner.model.logits(forward[: len(window)]).float(), dim=-1).cpu()

    @torch.inference_mode()
    def mean_squares(self, windows: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """Mean square of each input column by the name of the matrix that it meets: [K] float32, host memory."""
        self._observer.start()
        head = sum(self._read(window)[: len(window)].float().square().sum(dim=0) for window in windows)
        found = self._observer.finish()
        # What follows the final norm is the head's input; running the head itself would cost more than a layer.
        return {**found, HEAD: torch.as_tensor(head).cpu() / sum(len(window) for window in windows)}

    @torch.inference_mode()
    def second_moments(self, windows: Sequence[tuple[int, ...]], names: frozenset[str]) -> dict[str, Tensor]:
        """Mean of x x^T over the inputs of each matrix of `names`: [K, K] float32, host memory."""
        self._observer.start(names)
        head: Tensor | None = None
        for window in windows:
            hidden = self._read(window)[: len(window)].float()
            if HEAD in names:
                head = hidden.T @ hidden if head is None else head + hidden.T @ hidden
        found = {name: moments for name, moments in self._observer.finish().items() if name in names}
        return found if head is None else {**found, HEAD: head.cpu() / sum(len(window) for window in windows)}

    @torch.inference_mode()
    def losses(
        self, windows: Sequence[tuple[int, ...]], narrow: Callable[[str, LogicalWeight], LogicalWeight | None]
    ) -> dict[tuple[str, ...], float]:
        """KL to the model itself, nats a token, when only one group of matrices is narrowed, by the group's names.

        A group is what one kernel multiplies: q, k and v, or gate and up. `narrow` gives a matrix in its other form,
        or None where it stays; groups in which all stay are left out.
        """
        expected = [self.log_probs(window) for window in windows]
        found: dict[tuple[str, ...], float] = {}
        for group in self._observer.groups():
            changed = [narrow(name, part) if name else None for name, part in group.parts]
            if all(part is None for part in changed):
                continue
            parts = [part if part is not None else old for part, (_, old) in zip(changed, group.parts, strict=True)]
            with self._observer.replaced(group, parts):
                seen = [self.log_probs(window) for window in windows]
            names = tuple(name for (name, _), part in zip(group.parts, changed, strict=True) if part is not None)
            found[names] = agreement(expected, seen).mean_kl
        return found

    def _read(self, window: tuple[int, ...]) -> Tensor:
        request = Request("", window, Sampling(), seed=0, max_tokens=1, stop_ids=(), drafter="off")
        self._runner.admit(0, request, self._pages, None)
        _, forward = self._runner.prefill(PrefillPlan(0, 0, 0, len(window), "off"))
        return forward.hidden


class _NamingCheckpoint:
    """A checkpoint that tells the observer which weight has which name."""

    def __init__(self, checkpoint: Checkpoint, observer: _Observer) -> None:
        self._checkpoint, self._observer = checkpoint, observer

    def weight(self, name: str) -> LogicalWeight:
        weight = self._checkpoint.weight(name)
        self._observer.named[id(weight)] = (name, weight)
        return weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)


@dataclass(frozen=True)
class PackedGroup:
    """Matrices that were packed together. `parts`: name (empty for what the model made itself) and matrix."""

    parts: tuple[tuple[str, LogicalWeight], ...]
    gated: bool
    packed: PackedWeight


class _Observer:
    """A back end that can sum the squares of what its matrices are given; everything else passes through."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        # Objects are kept beside their ids, so that an id is never given to another.
        self.named: dict[int, tuple[str, LogicalWeight]] = {}
        self._packed: dict[int, tuple[tuple[str, ...], PackedGroup]] = {}
        self._replaced: dict[int, PackedWeight] = {}
        self._sums: dict[tuple[str, ...], Tensor] | None = None
        self._num_rows: dict[tuple[str, ...], int] = {}
        self._whole: frozenset[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack(self, parts: Sequence[LogicalWeight], gated: bool = False) -> PackedWeight:
        packed = self._ops.pack(parts, gated)
        named = tuple((self.named.pop(id(part))[0] if id(part) in self.named else "", part) for part in parts)
        names = tuple(name for name, _ in named if name)
        self._packed[id(packed)] = (names, PackedGroup(named, gated, packed))
        return packed

    def groups(self) -> tuple[PackedGroup, ...]:
        """Everything that was packed, in that order."""
        return tuple(group for _, group in self._packed.values())

    @contextmanager
    def replaced(self, group: PackedGroup, parts: Sequence[LogicalWeight]) -> Iterator[None]:
        """While the block runs, these matrices stand in for a group's own."""
        self._replaced[id(group.packed)] = self._ops.pack(parts, group.gated)
        try:
            yield
        finally:
            del self._replaced[id(group.packed)]

    def linear(self, x: Tensor, weight: PackedWeight, norm: Norm | None = None, **more: Any) -> Tensor:
        names = self._packed.get(id(weight), ((),))[0]
        if self._sums is not None and names and (self._whole is None or not self._whole.isdisjoint(names)):
            seen = (x if norm is None else self._ops.rms_norm(x, norm)).float()
            found = seen.square().sum(dim=0) if self._whole is None else seen.T @ seen
            self._sums[names] = self._sums[names] + found if names in self._sums else found
            self._num_rows[names] = self._num_rows.get(names, 0) + len(seen)
        return self._ops.linear(x, self._replaced.get(id(weight), weight), norm, **more)

    def start(self, whole: frozenset[str] | None = None) -> None:
        """Begin to sum: squares of all matrices' inputs, or whole second moments for those named."""
        self._sums, self._num_rows, self._whole = {}, {}, whole

    def finish(self) -> dict[str, Tensor]:
        sums, self._sums = self._sums or {}, None
        means = {names: total.cpu() / self._num_rows[names] for names, total in sums.items()}
        return {name: mean for names, mean in means.items() for name in names}


def agreement(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Agreement:
    """Lists of log-probabilities [T, V] of the same windows, the source's first."""
    kl = agreeing = 0.0
    num_tokens = 0
    for source, other in zip(expected, found, strict=True):
        # Ids that are no tokens have log-probability -inf in both.
        terms = torch.where(torch.isfinite(source), source.exp() * (source - other), torch.zeros_like(source))
        kl += float(terms.double().sum())
        agreeing += int((source.argmax(dim=-1) == other.argmax(dim=-1)).sum())
        num_tokens += len(source)
    return Agreement(kl / num_tokens, agreeing / num_tokens, num_tokens)
