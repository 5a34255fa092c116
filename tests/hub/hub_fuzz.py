"""Fuzzes what reads foreign bytes: GGUF files, weight headers, configs, hub listings, indexes, manifests and pins.

    PYTHONPATH=. python tests/hub/hub_fuzz.py --seconds 600 --results scripts/results/fuzz_hub.json

Damaged input may be refused with the reader's own error, or be accepted when the damage does not matter; any other
exception, more than `LIMIT_S` seconds or more than 1.5 GiB of memory is a finding, and its bytes are written to
tests/hub/corpus, which test_fuzz_corpus.py replays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hub_gguf_samples import SampleModel, write_model
from hub_hybrid_samples import write as write_hybrid
from safetensors.numpy import save

from localspec.hub import fit, get, gguf_architectures, layout, parts, pins, sources, support, tensor_pull
from localspec.hub.catalogue import HubSource, read_catalogue_file
from localspec.hub.convert import convert_gguf
from localspec.hub.records import HubError
from localspec.storage.errors import DamagedFile
from localspec.storage.safetensors import SafetensorsFile

CORPUS = Path(__file__).parent / "corpus"
LIMIT_S = 5.0
MEMORY_BYTES = 3 << 29
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "quantization_config": {"quant_method": "modelopt"},
    "text_config": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 1000, "mtp_num_hidden_layers": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
}  # fmt: skip
SOURCE = HubSource("a/b", include=("*.safetensors", "*.json"))


def read_gguf(raw: bytes, folder: Path) -> None:
    (folder / "x.gguf").write_bytes(raw)
    out = folder / "out"
    out.mkdir()
    convert_gguf(folder / "x.gguf", out, {})


def read_safetensors(raw: bytes, folder: Path) -> None:
    (folder / "x.safetensors").write_bytes(raw)
    with SafetensorsFile.open(folder / "x.safetensors") as file:
        for name in file.entries:
            bytes(file.tensor_bytes(name)[:16])


def read_listing(raw: bytes, folder: Path) -> None:
    try:
        listing = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(listing, dict):
        for entry in sources._wanted(listing, SOURCE):
            sources._listed_file(entry, "http://x", ())


def read_index(raw: bytes, folder: Path) -> None:
    sources._html_links(raw, "https://x/simple/p/")
    sources._json_links(raw, "https://x/simple/p/")


def read_config(raw: bytes, folder: Path) -> None:
    """Everything that is told from a config.json before its model is loaded."""
    (folder / "config.json").write_bytes(raw)
    config = layout.read_json(folder / "config.json")
    support.why_unsupported(config, ("llama", "qwen3_5"))
    get.promises_mtp(folder)
    fit.cache_shape(config).bytes_per_token("fp8", with_mtp=True)


def read_weight_map(raw: bytes, folder: Path) -> None:
    weight_map = tensor_pull.read_weight_map(raw, "an index")
    parts.files_of_text(weight_map)
    parts.files_with(weight_map, "mtp.")


def read_peek(raw: bytes, folder: Path) -> None:
    gguf_architectures.peek_architecture(raw[:4096])


def read_manifest(raw: bytes, folder: Path) -> None:
    (folder / layout.MANIFEST_NAME).write_bytes(raw)
    layout.read_manifest(folder)


def read_pins(raw: bytes, folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "models" / pins.PINS_NAME).write_bytes(raw)
    pins.read_pins(folder)


def read_catalogue(raw: bytes, folder: Path) -> None:
    (folder / "models.toml").write_bytes(raw)
    read_catalogue_file(folder / "models.toml")


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "gguf": read_gguf, "safetensors": read_safetensors, "listing": read_listing, "index": read_index,
    "manifest": read_manifest, "pins": read_pins, "catalogue": read_catalogue, "config": read_config,
    "weightmap": read_weight_map, "peek": read_peek,
}  # fmt: skip


def seeds() -> dict[str, list[bytes]]:
    """Good input of each kind, to be damaged."""
    record = layout.FileRecord(3, "ab" * 32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ggufs = []
        for architecture, pre in (("llama", "smollm"), ("qwen2", "qwen2"), ("qwen3", "llama-bpe")):
            write_model(folder / "m.gguf", SampleModel(architecture=architecture, pre=pre, n_layers=1))
            ggufs.append((folder / "m.gguf").read_bytes())
        write_hybrid(folder / "m.gguf")
        ggufs.append((folder / "m.gguf").read_bytes())
        files = {"config.json": record}
        layout.write_manifest(folder, layout.Manifest("m", "s", "l", files, layout.fingerprint_of(files)))
        manifest = (folder / layout.MANIFEST_NAME).read_bytes()
    sibling = {"rfilename": "a.json", "size": 3, "blobId": "0" * 40, "lfs": {"sha256": "0" * 64}}
    listing = {"sha": "0" * 40, "siblings": [sibling]}
    pin = {"commit": "0" * 40, "licence": "x", "files": {"a.json": {"size": 3, "sha256": "0" * 64}}}
    page = {"files": [{"filename": "a-1-py3-none-any.whl", "url": "../a.whl", "hashes": {"sha256": "0" * 64}}]}
    return {
        "gguf": ggufs,
        "safetensors": [save({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)})],
        "listing": [json.dumps(listing).encode()],
        "index": [json.dumps(page).encode(), b'<a href="../a.whl#sha256=00">a</a>'],
        "manifest": [manifest],
        "pins": [json.dumps({"format_version": 1, "repositories": {"a/b@main *": pin}}).encode()],
        "config": [json.dumps(CONFIG).encode(), json.dumps(CONFIG["text_config"] | {"model_type": "llama"}).encode()],
        "weightmap": [
            json.dumps({"metadata": {}, "weight_map": {"mtp.a": "a.safetensors", "b": "b.safetensors"}}).encode()
        ],
        "peek": [raw[:4096] for raw in ggufs],
        "catalogue": [(Path(__file__).parents[2] / "models.toml").read_bytes()],
    }


NUMBERS = (0, 1, 2, 3, 7, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)
WORDS = (
    b"null", b"true", b"-1", b"1e999", b"[]", b"{}", b'""', b'"../x"', b"[" * 5000, b"99999999999999999999", b"\xff",
    b"\0", b"NaN", b'{"a":' * 3000, b"//[", b"http://[", b"1" * 5000, b"\\ud800",
)  # fmt: skip


def damage(raw: bytes, rng: random.Random) -> bytes:
    """One to four changes; those to binary numbers keep to the first part, where headers are."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(max(1, min(len(out), rng.choice((64, 1024, 20_000, len(out))))))
        kind = rng.randrange(6)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del out[at : at + rng.choice((1, 4, 8, 100, len(out)))]
        elif kind == 4:
            out[at:at] = rng.choice(WORDS)
        else:
            end = at + rng.choice((1, 3, 8, 40))
            out[at:at] = out[at:end]
    return bytes(out)


def problem_with(kind: str, raw: bytes) -> str | None:
    """What is wrong with how a reader takes these bytes; None when it behaves."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        try:
            TARGETS[kind](raw, Path(name))
        except (HubError, DamagedFile):
            pass
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began_s
    return f"it took {took_s:.1f} s" if took_s > LIMIT_S else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(TARGETS))
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    rng, good = random.Random(arguments.seed), seeds()
    kinds = [arguments.only] if arguments.only else sorted(TARGETS)
    counts, findings = dict.fromkeys(kinds, 0), set()
    until_s = time.monotonic() + arguments.seconds
    while time.monotonic() < until_s:
        kind = rng.choice(kinds)
        raw = damage(rng.choice(good[kind]), rng)
        counts[kind] += 1
        problem = problem_with(kind, raw)
        if problem is not None and (kind, problem[:60]) not in findings:
            findings.add((kind, problem[:60]))
            CORPUS.mkdir(exist_ok=True)
            path = CORPUS / f"{kind}-{hashlib.sha256(raw).hexdigest()[:12]}"
            path.write_bytes(raw)
            print(f"{path.name}: {problem}", flush=True)
    document = {"seconds": arguments.seconds, "seed": arguments.seed, "inputs": counts, "findings": len(findings)}
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
