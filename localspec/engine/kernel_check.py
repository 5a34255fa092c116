"""Whether the kernels compute what they must on this very card: tested at the first start, remembered for the build.

A card, driver, Triton, PyTorch or kernel file that changed means another test. Knows no models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

import localspec.kernels
from localspec.api.types import EngineError
from localspec.hub.gpus import read_gpus
from localspec.kernels import self_test
from localspec.kernels.ops import Ops
from localspec.kernels.self_test import SelfTestReport
from localspec.storage.files import AtomicFile

log = logging.getLogger(__name__)
BUDGET_S = 60.0
"""Groups that compiling leaves no time for are tested at the next start, when all is compiled."""
FILE_NAME = "kernel-check.json"
Report = Callable[[str], None]


def check_kernels(ops: Ops, cache_dir: Path | None, report: Report) -> SelfTestReport | None:
    """Test the back end unless this card and build passed before. None where it did, or on a CPU.

    Raises EngineError (`machine_cannot`) naming the groups that are wrong.
    """
    if ops.device.type != "cuda":
        return None
    key = build_key(ops)
    if cache_dir is not None and isinstance(_known(cache_dir / FILE_NAME).get(key), dict):
        return None
    report("testing the kernels on this card, once")
    found = self_test.run(ops, ops.device, BUDGET_S)
    for line in found.lines():
        log.info("%s", line)
    if found.failures:
        names = "; ".join(found.failures)
        is_fp4 = {each.group for each in found.results if each.problem} == {self_test.FP4_GROUP}
        advice = "leave --experimental-fp4-prompts out" if is_fp4 else "update the driver, or use --device cpu"
        raise EngineError("machine_cannot", f"On this card kernels do not compute what they must ({names}); {advice}.")
    if cache_dir is not None and not found.skipped:
        _remember(cache_dir / FILE_NAME, key, found)
    return found


def build_key(ops: Ops) -> str:
    """Names everything that a result of the test depends on."""
    reading = read_gpus()
    card = torch.cuda.get_device_name(ops.device) if ops.device.type == "cuda" else "cpu"
    return (
        f"{card}, driver {reading.driver_version}, torch {torch.__version__}, {ops.name}, {ops.arithmetic} {_sources()}"
    )


def _sources() -> str:
    """Hash of every file of the kernels; Triton's version is a part of it, as another one compiles them otherwise."""
    digest = hashlib.sha256()
    folder = Path(localspec.kernels.__path__[0])
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    try:
        from localspec.kernels.compat import triton_version

        digest.update(repr(triton_version()).encode())
    except ImportError:
        digest.update(b"without Triton")
    return digest.hexdigest()[:16]


def _known(path: Path) -> dict[str, object]:
    """Results by key, the oldest first; empty where nothing can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(path: Path, key: str, found: SelfTestReport) -> None:
    """This result and the one before are kept: with an option and without it. A cache that cannot be written costs a
    test at the next start."""
    results = [{name: _plain(value) for name, value in asdict(each).items()} for each in found.results]
    before = dict([*_known(path).items()][-1:])
    text = json.dumps(before | {key: {"seconds": found.seconds, "results": results}}, indent=1)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with AtomicFile(path, durable=False) as file:
            file.write(text.encode())
    except OSError as error:
        log.info("the result of the kernels' test is not kept: %s", error)


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
