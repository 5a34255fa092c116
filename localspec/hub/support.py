"""Whether a hub repository can run here, told from its config.json before its weights are fetched. Torch-free.

The architectures are the files of localspec/models (file name = `model_type`); they are listed, not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUANT_METHODS = ("modelopt", "compressed-tensors", "fp8", "localspec-blocks")
MODELS_DIRECTORY = Path(__file__).resolve().parents[1] / "models"


def supported_model_types(directory: Path = MODELS_DIRECTORY) -> tuple[str, ...]:
    """`model_type`s that have a file."""
    return tuple(sorted(path.stem for path in directory.glob("*.py") if not path.stem.startswith("_")))


def why_unsupported(config: Mapping[str, Any], model_types: tuple[str, ...]) -> str | None:
    """One clause that says why a model with this config.json cannot run, or None."""
    model_type = config.get("model_type")
    if model_type not in model_types:
        return f"its architecture {model_type!r} is not supported (supported: {', '.join(model_types) or 'none'})"
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in QUANT_METHODS:
        return f"its weight format {method!r} is not supported (supported: none at all, {', '.join(QUANT_METHODS)})"
    return None
