#!/usr/bin/env python3
"""How fast packed weights are read, held against what the disk gives: ratio, memory, and time for checksums alone.

Writes a file of random tensors with the sizes of a 27B's layers in --folder, reads it past the page cache with plain
threads (the control) and through the ring as a start does, in turns, and prints the medians and one line of JSON. On a
card (--device cuda) the ring copies into its memory. Processor time tells more than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import xxhash

from localspec.formats._packed_file import PIECE_BYTES, PackedHeader, PackedWriter, read_header
from localspec.formats._packed_ring import READ_THREADS, PackedRing
from localspec.storage.buffers import aligned_memory
from localspec.storage.open_file import OpenFile

LAYER_BYTES = (47_185_920, 17_694_720, 100_270_080, 50_135_040, 65_536, 20_480, 139_264, 20_480)


def write(path: Path, total_bytes: int) -> None:
    memory = torch.randint(0, 256, (max(LAYER_BYTES),), dtype=torch.uint8).numpy()
    written, turn = 0, 0
    with PackedWriter(path) as writer:
        while written < total_bytes:
            size = LAYER_BYTES[turn % len(LAYER_BYTES)]
            writer.add("U8", (size,), [memory[:size]])
            written, turn = written + size, turn + 1
        writer.finish({})


def read_plain(path: Path, threads: int) -> float:
    """Bytes per second of `threads` threads that read pieces one after the other into memory of their own."""
    file = OpenFile(path)
    local = threading.local()

    def piece(offset: int) -> int:
        if not hasattr(local, "memory"):
            local.memory = aligned_memory(PIECE_BYTES).data
        return os.preadv(file.fileno(), [local.memory], offset)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(piece, range(0, file.size_bytes, PIECE_BYTES)))
    return total / (time.perf_counter() - started)


def read_ring(path: Path, header: PackedHeader, device: torch.device) -> float:
    """Bytes per second of a start's way, into memory that was touched before."""
    target = torch.zeros(max(LAYER_BYTES), dtype=torch.uint8, device=device)
    started = time.perf_counter()
    total = 0
    with PackedRing(path, header, device) as ring:
        for number, stored in enumerate(header.tensors):
            ring.read_into(number, target[: stored.length_bytes])
            total += stored.length_bytes
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return total / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        path = Path(name) / "weights.packed"
        write(path, int(arguments.gib * 2**30))
        header = read_header(path)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        plain, ring = [], []
        processor_s = 0.0
        for _ in range(arguments.turns):
            plain.append(read_plain(path, READ_THREADS))
            used = time.process_time()
            ring.append(read_ring(path, header, torch.device(arguments.device)))
            processor_s += time.process_time() - used
        direct = OpenFile(path).direct
    piece = os.urandom(PIECE_BYTES)
    started = time.perf_counter()
    for _ in range(20):
        xxhash.xxh3_64_intdigest(piece)
    hash_rate = 20 * PIECE_BYTES / (time.perf_counter() - started)
    document = {
        "gib": arguments.gib,
        "device": arguments.device,
        "past_page_cache": direct,
        "disk_gb_per_s": statistics.median(plain) / 1e9,
        "ring_gb_per_s": statistics.median(ring) / 1e9,
        "ratio": statistics.median(ring) / statistics.median(plain),
        "ratios": [round(a / b, 3) for a, b in zip(ring, plain, strict=True)],
        "processor_s_per_gb": processor_s / arguments.turns / (arguments.gib * 2**30 / 1e9),
        "more_memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 2**10,
        "checksum_gb_per_s": hash_rate / 1e9,
        "load_average": os.getloadavg()[0],
        "processors": os.cpu_count(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
