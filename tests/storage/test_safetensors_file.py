"""The weight-file reader against the safetensors package, and against headers made to harm."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from localspec.storage.files import TEMPORARY_PREFIX, AtomicFile, sweep_temporary_files
from localspec.storage.safetensors import DTYPE_BYTES, DamagedFile, SafetensorsFile, parse_header, write_safetensors

NUMPY_DTYPES = {"F32": "f4", "F16": "f2", "U8": "u1", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "BOOL": "?"}
CASE_DTYPES = ["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "I8", "I16", "I32", "I64", "BOOL"]


def build(header: Any, data: bytes = b"", declared_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if declared_bytes is None else declared_bytes).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"a.{name}": (rng.random((3, 5, 7)) * 100).astype(kind) for name, kind in NUMPY_DTYPES.items()} | {
        "scalar": np.array(2.5, dtype="f4"),
        "empty": np.zeros((0, 9), dtype="i4"),
    }
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "np", "ключ": "значение"})
    with SafetensorsFile.open(tmp_path / "a.safetensors") as file:
        assert set(file.entries) == set(arrays)
        assert file.metadata["ключ"] == "значение"
        for name, array in arrays.items():
            assert file.entries[name].shape == array.shape
            assert bytes(file.tensor_bytes(name)) == array.tobytes()
            target = bytearray(array.nbytes)
            file.read_into(name, memoryview(target))
            assert bytes(target) == array.tobytes()


def test_reads_every_dtype_of_the_package(tmp_path: Path) -> None:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
             "F8_E5M2": "float8_e5m2", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
             "BOOL": "bool"}  # fmt: skip
    data = {key: np.frombuffer(os.urandom(6 * DTYPE_BYTES[key]), dtype="u1") for key in names}
    if hasattr(safetensors, "TensorSpec"):
        specs = {
            k: safetensors.TensorSpec(
                dtype=names[k], shape=[2, 3], data_ptr=data[k].ctypes.data, data_len=data[k].nbytes
            )
            for k in names
        }
    else:  # before 0.8
        specs = {k: {"dtype": names[k], "shape": [2, 3], "data": data[k].tobytes()} for k in names}
    safetensors.serialize_file(specs, tmp_path / "d", None)
    with SafetensorsFile.open(tmp_path / "d") as file:
        for key in names:
            assert (file.entries[key].dtype, bytes(file.tensor_bytes(key))) == (key, data[key].tobytes())


def test_package_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    data = {dtype: os.urandom(15 * DTYPE_BYTES[dtype]) for dtype in CASE_DTYPES}
    made: list[str] = []

    def produce(dtype: str) -> bytes:
        made.append(dtype)
        return data[dtype]

    items = [(f"t.{d}", d, (3, 5), (lambda d=d: produce(d))) for d in CASE_DTYPES]
    write_safetensors(path, [*items, ("none", "I64", (0, 4), b"")], {"made_by": "test"})
    assert sorted(made) == sorted(CASE_DTYPES)
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert {f"t.{d}": data[d] for d in CASE_DTYPES} | {"none": b""} == {n: bytes(t["data"]) for n, t in found.items()}
    assert {n: t["dtype"] for n, t in found.items()} == {f"t.{d}": d for d in CASE_DTYPES} | {"none": "I64"}
    with SafetensorsFile.open(path) as file:
        assert file.metadata == {"made_by": "test"}
        assert all(e.offset_bytes % DTYPE_BYTES[e.dtype] == 0 for e in file.entries.values())
    assert path.stat().st_mode & 0o777 == 0o600


def test_numpy_arrays_and_views_are_written(tmp_path: Path) -> None:
    array = np.arange(30, dtype="f4").reshape(5, 6)
    write_safetensors(tmp_path / "n", [("x", "F32", (5, 6), array), ("y", "F32", (6, 5), array.T.copy())])
    loaded = load_file(tmp_path / "n")
    assert np.array_equal(loaded["x"], array)
    assert np.array_equal(loaded["y"], array.T)
    with pytest.raises(ValueError, match="contiguous"):
        write_safetensors(tmp_path / "m", [("x", "F32", (6, 5), array.T)])
    assert [p.name for p in tmp_path.iterdir()] == ["n"]


HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "header beyond the limit": build(b"{}", declared_bytes=1 << 40),
    "header beyond the file": build(b"{}", declared_bytes=3),
    "negative length": build(b"{}", declared_bytes=(1 << 64) - 1),
    "not an object": build(b"[1]"),
    "leading space": build(b" {}"),
    "not json": build(b"{'a': 1}"),
    "not utf-8": build(b'{"\xff": 1}'),
    "byte order mark": build("\ufeff{}".encode()),
    "deep list": build(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep object": build(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "duplicate tensor": build(b'{"a":%s,"a":%s}' % ((json.dumps(tensor(0, 1)).encode(),) * 2), b"x"),
    "duplicate field": build(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "unknown dtype": build({"a": tensor(0, 1, dtype="F4")}, b"x"),
    "dtype no string": build({"a": tensor(0, 1, dtype=["U8"])}, b"x"),
    "further field": build({"a": tensor(0, 1) | {"x": 1}}, b"x"),
    "missing field": build({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
    "overlap": build({"a": tensor(0, 4), "b": tensor(2, 6)}, b"x" * 6),
    "same range twice": build({"a": tensor(0, 4), "b": tensor(0, 4)}, b"x" * 4),
    "gap": build({"a": tensor(0, 2), "b": tensor(4, 6)}, b"x" * 6),
    "trailing bytes": build({"a": tensor(0, 2)}, b"x" * 3),
    "truncated data": build({"a": tensor(0, 4)}, b"x" * 3),
    "negative offset": build({"a": tensor(-1, 0)}, b"x"),
    "reversed": build({"a": tensor(4, 0, shape=[4])}, b"x" * 4),
    "negative size": build({"a": tensor(0, 4, shape=[-2, -2])}, b"x" * 4),
    "product overflows": build({"a": tensor(0, 0, shape=[1 << 62, 1 << 62, 4])}),
    "hidden by zero": build({"a": tensor(0, 0, shape=[0, 1 << 70])}),
    "size does not fit": build({"a": tensor(0, 4, dtype="F32", shape=[2])}, b"x" * 4),
    "bool size": build({"a": tensor(0, 1, shape=[True])}, b"x"),
    "float size": build({"a": tensor(0, 1, shape=[1.0])}, b"x"),
    "nan": build(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
    "digits": build(b'{"a":{"dtype":"U8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,1]}}', b"x"),
    "many dimensions": build({"a": tensor(0, 1, shape=[1] * 9)}, b"x"),
    "long name": build({"a" * 5000: tensor(0, 1)}, b"x"),
    "metadata no strings": build({"__metadata__": {"a": 1}}),
    "metadata no object": build({"__metadata__": "a"}),
    "entry no object": build({"a": 3}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "h.safetensors"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(DamagedFile) as caught:
        SafetensorsFile.open(path)
    assert len(str(caught.value)) < 400 + len(str(path))
    assert "\n" not in str(caught.value)


def test_a_name_that_comes_twice_among_many_is_found_soon() -> None:
    names = [*range(60_000), 59_999]
    text = b"{" + b",".join(b'"%d":0' % name for name in names) + b"}"
    began_s = time.process_time()
    with pytest.raises(DamagedFile, match="holds '59999' twice"):
        parse_header(text, 0, 0)
    assert time.process_time() - began_s < 5


def test_pipe_and_directory_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedFile):
        SafetensorsFile.open(tmp_path / "pipe")
    with pytest.raises(DamagedFile):
        SafetensorsFile.open(tmp_path)


def test_file_cut_while_open_is_said(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_safetensors(path, [("a", "U8", (10_000,), b"x" * 10_000)])
    with SafetensorsFile.open(path) as file:
        os.truncate(path, 5_000)
        with pytest.raises(DamagedFile, match="ends inside"):
            file.read_into("a", memoryview(bytearray(10_000)))
        with pytest.raises(ValueError, match="must have"):
            file.read_into("a", memoryview(bytearray(9_999)))
        with pytest.raises(KeyError, match="no tensor"):
            file.entry("b")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 66) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
sizes = st.integers(-2, 40)
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BYTES, "F4"]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=4), tensors | json_values, max_size=4), st.integers(0, 60))
def test_whatever_the_header_says_ranges_stay_inside(header: dict[str, Any], data_bytes: int) -> None:
    text = json.dumps(header).encode()
    try:
        entries, _ = parse_header(text, data_bytes, 8 + len(text))
    except DamagedFile:
        return
    covered = sorted((e.offset_bytes, e.offset_bytes + e.length_bytes) for e in entries.values() if e.length_bytes)
    assert sum(end - begin for begin, end in covered) == data_bytes
    assert all(8 + len(text) <= begin < end <= 8 + len(text) + data_bytes for begin, end in covered)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(covered))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_flipped_header_byte_never_escapes(tmp_path: Path, position: int, value: int) -> None:
    good = build({"a": tensor(0, 4, dtype="F32", shape=[1]), "b": tensor(4, 10)}, b"0123456789")
    header_end = len(good) - 10
    bad = bytearray(good)
    bad[position % header_end] = value
    (tmp_path / "f").write_bytes(bad)
    try:
        with SafetensorsFile.open(tmp_path / "f") as file:
            for name, entry in file.entries.items():
                assert len(file.tensor_bytes(name)) == entry.length_bytes
    except DamagedFile:
        pass


@pytest.mark.parametrize("fail_after", [0, 1, 2, 3])
def test_full_disk_leaves_nothing(tmp_path: Path, fail_after: int) -> None:
    calls = 0

    def failing(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls > fail_after:
            raise OSError(28, "No space left on device")
        return os.write(fd, data[:100])

    with pytest.raises(OSError, match="space"):
        write_safetensors(tmp_path / "x", [("a", "U8", (500,), bytes(500))], write_function=failing)
    assert list(tmp_path.iterdir()) == []


def test_wrong_buffer_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "keep"
    write_safetensors(path, [("a", "U8", (3,), b"abc")])
    before = path.read_bytes()
    for items in (
        [("a", "U8", (4,), b"abc")],
        [("a", "U8", (3,), b"abc")] * 2,
        [("a", "F4", (3,), b"abc")],
        [("__metadata__", "U8", (3,), b"abc")],
    ):
        with pytest.raises(ValueError):
            write_safetensors(path, items)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_sweep_spares_a_living_writer(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY_PREFIX}dead").write_bytes(b"x")
    target = tmp_path / "outside"
    target.write_bytes(b"stays")
    (tmp_path / f"{TEMPORARY_PREFIX}link").symlink_to(target)
    with AtomicFile(tmp_path / "alive") as file:
        file.write(b"y")
        assert sweep_temporary_files(tmp_path) == 2
        assert file.temporary_path.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alive", "outside"]
