"""Architectures, one file each, found by `model_type`. This file holds the Protocol and the finding.

A model knows weights, layers and caches; nothing of requests, drafters or sampling.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Forward, HiddenNeeds, Rows
from localspec.core.state import Cache
from localspec.formats import Checkpoint
from localspec.kernels.ops import Ops
from localspec.layers.decoder import ForwardPass


class Model(Protocol):
    """A loaded target model. Sizes are fixed at load."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context_tokens: int
    cache_spec: CacheSpec
    read_bytes_per_token: int

    def forward(self, rows: Rows, cache: Cache, needs: HiddenNeeds) -> Forward:
        """Run the rows: write their keys and values, advance or record their states, return hiddens [R, D].

        Padding rows (slot -1) change nothing. Rows of kind `verify` leave recurrent state uncommitted (rings).
        """
        ...

    def begin(self, rows: Rows, cache: Cache, needs: HiddenNeeds) -> ForwardPass:
        """The same pass, of which no layer has run yet."""
        ...

    def advance(self, under_way: ForwardPass, num_layers: int) -> Forward | None:
        """Run the next layers of a pass; its result once all have run. Passes of other slots may run in between, and
        one that is left undone has written nothing but keys, values and states of its own rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] after the final norm -> [R, V] float32; ids that are no tokens are -inf."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """[R] -> [R, D]; drafters share the target's embedding."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[V, D], the table that `embed` reads, for `Ops` that join it with what follows."""
        ...

    def fold(self, cache: Cache, pending_rows: Tensor) -> None:
        """Commit the pending rows of every slot's recurrent state; nothing to do without such state."""
        ...


class Architecture(Protocol):
    """What a module of this package offers: `load`, and `tiny_config` for tests (a config.json as a dict)."""

    def load(self, config: Mapping[str, Any], checkpoint: Checkpoint, ops: Ops) -> Model: ...

    def tiny_config(self) -> dict[str, Any]: ...


def architectures() -> tuple[str, ...]:
    """Names of all architectures, from the files of this package."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def architecture(model_type: str) -> Architecture:
    """The module for a config's `model_type`. Raises ValueError naming what is supported."""
    if model_type not in architectures():
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {', '.join(architectures())}")
    module: Architecture = importlib.import_module(f"{__name__}.{model_type}")
    return module
