"""The GGUF reader against the `gguf` package: block formats bit for bit, headers, and headers made to hurt."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hub_gguf_samples import random_blocks

from localspec.hub.gguf import TENSOR_TYPES, GgufError, GgufFile, dequantise


@pytest.mark.parametrize("type_id", sorted(TENSOR_TYPES), ids=lambda i: TENSOR_TYPES[i].name)
def test_block_format_equals_reference_bit_for_bit(type_id: int) -> None:
    kind = TENSOR_TYPES[type_id]
    raw = random_blocks(type_id, n_blocks=63 * 8, seed=type_id)
    ours = dequantise(kind.name, raw)
    theirs = gguf.quants.dequantize(raw.reshape(63, -1), gguf.GGMLQuantizationType(type_id))
    if kind.name in ("F32", "BF16"):  # random patterns include NaN
        assert np.array_equal(ours.reshape(-1).view(np.uint32), theirs.reshape(-1).view(np.uint32))
    else:
        np.testing.assert_array_equal(ours.reshape(-1), theirs.reshape(-1))
        assert np.isfinite(ours).all()


@pytest.mark.parametrize("type_id", sorted(TENSOR_TYPES), ids=lambda i: TENSOR_TYPES[i].name)
def test_block_sizes_equal_reference(type_id: int) -> None:
    kind = TENSOR_TYPES[type_id]
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
    assert (kind.block_values, kind.block_bytes) == sizes
    assert gguf.GGMLQuantizationType(type_id).name == kind.name


def test_every_e4m3_and_e8m0_scale_byte() -> None:
    nvfp4 = np.zeros((256, 36), dtype=np.uint8)
    nvfp4[:, :4] = np.arange(256, dtype=np.uint8)[:, None]
    nvfp4[:, 4:] = np.arange(32, dtype=np.uint8) * 7
    theirs = gguf.quants.dequantize(nvfp4[:128], gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(dequantise("NVFP4", nvfp4[:128]), theirs)
    mxfp4 = np.zeros((255, 17), dtype=np.uint8)
    mxfp4[:, 0] = np.arange(255)
    mxfp4[:, 1:] = np.arange(16, dtype=np.uint8) * 17
    theirs = gguf.quants.dequantize(mxfp4, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(dequantise("MXFP4", mxfp4), theirs)


def write_sample(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    dense = rng.normal(size=(3, 5)).astype(np.float32)
    wide = rng.normal(size=(7, 64)).astype(np.float32)
    packed = gguf.quants.quantize(wide, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ä", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 4])
    writer.add_tensor("dense", dense)
    writer.add_tensor("wide", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"dense": dense, "wide": gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)}


def test_header_and_tensors_of_a_written_file(tmp_path: Path) -> None:
    expected = write_sample(tmp_path / "sample.gguf")
    with GgufFile(tmp_path / "sample.gguf") as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.block_count"] == 2
        assert file.metadata["tokenizer.ggml.add_bos_token"] is False
        assert file.metadata["tokenizer.ggml.tokens"] == ("a", "ä", "")
        assert file.metadata["tokenizer.ggml.token_type"] == (1, 3, 4)
        assert file.tensors["wide"].shape == (7, 64)
        for name, values in expected.items():
            np.testing.assert_array_equal(file.dequantise(file.tensors[name]), values)


def header(n_tensors: int = 0, n_keys: int = 0, version: int = 3, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_entry(name: bytes = b"t", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


PAD = b"\0" * 4096
HOSTILE = {
    "empty": (b"", "empty"),
    "other magic": (b"PK\x03\x04" + PAD, "not a GGUF file"),
    "short": (b"GGUF\x03", "past the end"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "absurd tensor count": (header(n_tensors=1 << 62), "tensor count"),
    "tensor count beyond the file": (header(n_tensors=1000, body=b"\0" * 64), "tensor count"),
    "absurd key count": (header(n_keys=(1 << 64) - 1), "metadata count"),
    "huge key": (header(n_keys=1, body=struct.pack("<Q", 1 << 60) + PAD), "metadata key"),
    "huge string": (header(n_keys=1, body=text(b"k") + struct.pack("<IQ", 8, 1 << 40) + PAD), "'k'"),
    "huge array": (header(n_keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 40) + PAD), "'k'"),
    "nested array": (header(n_keys=1, body=text(b"k") + struct.pack("<IIQ", 9, 9, 1) + PAD), "not supported"),
    "unknown value type": (header(n_keys=1, body=text(b"k") + struct.pack("<I", 99) + PAD), "unknown type 99"),
    "bad UTF-8": (header(n_keys=1, body=text(b"\xff\xfe") + struct.pack("<IB", 0, 1) + PAD), "UTF-8"),
    "key twice": (header(n_keys=2, body=(text(b"k") + struct.pack("<IB", 0, 1)) * 2 + PAD), "twice"),
    "alignment 3": (header(n_keys=1, body=text(b"general.alignment") + struct.pack("<II", 4, 3) + PAD), "power of two"),
    "alignment 0": (header(n_keys=1, body=text(b"general.alignment") + struct.pack("<II", 4, 0) + PAD), "power of two"),
    "no dimensions": (header(1, body=tensor_entry(sizes=()) + PAD), "0 dimensions"),
    "nine dimensions": (header(1, body=tensor_entry(sizes=(1,) * 9) + PAD), "9 dimensions"),
    "unknown tensor type": (header(1, body=tensor_entry(kind=77) + PAD), "unsupported type 77"),
    "zero size": (header(1, body=tensor_entry(sizes=(0, 4)) + PAD), "blocks"),
    "ragged row": (header(1, body=tensor_entry(sizes=(33,), kind=3) + PAD), "blocks of 32"),
    "overflowing shape": (header(1, body=tensor_entry(sizes=(1 << 63, 1 << 63)) + PAD), "inside the file"),
    "offset past the end": (header(1, body=tensor_entry(offset=1 << 62) + PAD), "inside the file"),
    "unaligned offset": (header(1, body=tensor_entry(offset=4) + PAD), "inside the file"),
    "name twice": (header(2, body=tensor_entry() * 2 + PAD), "twice"),
    "overlap": (header(2, body=tensor_entry() + tensor_entry(b"u", offset=32) + PAD), "overlaps"),
}


@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_header_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(GgufError, match=message):
        GgufFile(path)


def test_truncated_at_every_place_never_escapes(tmp_path: Path) -> None:
    write_sample(tmp_path / "sample.gguf")
    whole = (tmp_path / "sample.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for n_bytes in range(0, len(whole) - 32, 7):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(GgufError):
            GgufFile(path)


def test_random_damage_gives_an_error_or_a_file(tmp_path: Path) -> None:
    write_sample(tmp_path / "sample.gguf")
    whole = bytearray((tmp_path / "sample.gguf").read_bytes())
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(11)
    n_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(0, 400, size=3):
            damaged[at] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            with GgufFile(path) as file:
                for tensor in file.tensors.values():
                    file.blocks(tensor)
        except GgufError:
            n_refused += 1
    assert n_refused > 100
