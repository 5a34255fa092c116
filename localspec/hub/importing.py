"""`localspec import`: a model that is already on this disk, as a GGUF file or as a checkpoint folder. Torch-free.

The files are copied, so that what the user does with the originals does not change the installed model. Knows no
network and no catalogue.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

from localspec.hub import layout, support
from localspec.hub.catalogue import DEFAULT_INCLUDE, id_from_name
from localspec.hub.install import CONVERTED_SIZE_FACTOR, LocalFile, NewModel, install
from localspec.hub.meter import ProgressMeter
from localspec.hub.parts import files_of_text
from localspec.hub.records import (
    EXIT_MACHINE_CANNOT,
    HubError,
    ProgressCallback,
    PullProgress,
    PullResult,
    ignore_progress,
)


def import_path(
    path: Path, data_dir: Path, progress: ProgressCallback = ignore_progress, model_id: str | None = None
) -> PullResult:
    """Installs `path` (a .gguf file or a folder with config.json and *.safetensors) under `model_id` or its own name.

    Raises HubError when there is nothing there, the model is not supported or damaged, its id is taken, or the disk is
    too small.
    """
    path = path.expanduser()
    if not path.exists():
        raise HubError(f"{path} does not exist; give a .gguf file or a folder with config.json and *.safetensors")
    name = layout.check_model_id(model_id) if model_id else id_from_name(path.resolve().name.removesuffix(".gguf"))
    if (layout.models_directory(data_dir) / name).exists():
        raise HubError(f"a model {name} is already installed; remove it or import under another name")
    files = _gguf_file(path) if path.is_file() else _checkpoint_files(path)
    size_bytes = sum(file.path.stat().st_size for file in files)
    factor = CONVERTED_SIZE_FACTOR if path.is_file() else 1.0
    layout.refuse_small_disk(name, int(size_bytes * factor), data_dir)
    model = NewModel(name, f"imported from {layout.readable_path(path)}", "not stated")
    try:
        directory = install(files, model, data_dir, ProgressMeter(progress))
    except OSError as error:
        raise HubError(f"{name} cannot be written to {data_dir}: {error}", EXIT_MACHINE_CANNOT) from error
    progress(PullProgress("done", f"{name} is ready"))
    manifest = layout.read_manifest(directory)
    sizes: dict[str, int | None] = {n: record.size_bytes for n, record in manifest.files.items()}
    return PullResult(name, str(directory), manifest.source, sizes)


def _gguf_file(path: Path) -> list[LocalFile]:
    if path.suffix != ".gguf":
        raise HubError(f"{path} is not a .gguf file; other single files cannot be imported")
    return [LocalFile(path.name, path, None, "copied")]


def _checkpoint_files(folder: Path) -> list[LocalFile]:
    """Files at the top of the folder that belong to a checkpoint; links are followed, as hub caches consist of them."""
    config = folder / "config.json"
    if not config.is_file():
        raise HubError(f"{folder} has no config.json; give the folder of one model")
    reason = support.why_unsupported(layout.read_json(config), support.supported_model_types())
    if reason is not None:
        raise HubError(f"{folder} cannot be imported: {reason}")
    _refuse_missing(folder)
    return [
        LocalFile(path.name, path.resolve(), None, "copied")
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in DEFAULT_INCLUDE)
    ]


def _refuse_missing(folder: Path) -> None:
    """An index names what a download that was cut short lacks: said before the rest is copied.

    One of which nothing is there is left over from another form of the model.
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        wanted = files_of_text(_weight_map(index))
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if 0 < len(missing) < len(wanted):
            raise HubError(f"{folder} lacks {missing[0]}, which its index names; fetch the missing files first")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of an index; empty where it names none."""
    weight_map = layout.read_json(index).get("weight_map")
    named = weight_map.items() if isinstance(weight_map, dict) else ()
    return {name: file for name, file in named if isinstance(file, str)}
