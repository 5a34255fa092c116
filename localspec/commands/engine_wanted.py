"""Whether a running engine is the one that a chat asks for. Pure: compares what was asked with what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differences(
    model_id: str | None,
    context_tokens: int | None,
    device: str,
    arguments: Sequence[str],
    state: Mapping[str, Any],
    kv_cache: str = "auto",
    fp4_prompts: bool = False,
) -> list[str]:
    """What a running engine has that was explicitly asked otherwise, each in a few words; empty if it fits.

    `arguments` is the command line it was started with, `state` what its port says (empty while it starts). None, and
    `auto` for device and cache, ask for nothing.
    """
    metrics, model = state.get("metrics") or {}, state.get("model") or {}
    found = []
    has_model = model.get("id") or metrics.get("model_id") or _value(arguments, "--model")
    if model_id is not None and has_model and has_model != model_id:
        found.append(f"the model {has_model}")
    has_context = str(_value(arguments, "--context") or metrics.get("context_limit_tokens") or "a context of its own")
    if context_tokens is not None and has_context != str(context_tokens):
        found.append(f"a context of {has_context} tokens" if has_context.isdecimal() else has_context)
    has_device = _value(arguments, "--device") or "auto"
    if device not in ("auto", has_device):
        # An engine that chose by itself says in words what it took.
        is_on_cpu = str(metrics.get("device", "")).startswith("cpu")
        fits = has_device == "auto" and metrics.get("device") and ":" not in device and is_on_cpu == (device == "cpu")
        if not fits:
            found.append(f"the device {metrics.get('device') or has_device}")
    has_cache = _value(arguments, "--kv-cache") or "auto"
    if kv_cache not in ("auto", has_cache):
        found.append(f"the cache type {has_cache}")
    has_fp4 = "--experimental-fp4-prompts" in arguments
    if fp4_prompts != has_fp4:
        found.append("prompts that are read in FP4" if has_fp4 else "prompts that are not read in FP4")
    return found


def _value(arguments: Sequence[str], name: str) -> str:
    places = [at for at, argument in enumerate(arguments[:-1]) if argument == name]
    return arguments[places[-1] + 1] if places else ""
