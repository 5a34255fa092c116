"""Compact import: every architecture in NVFP4 runs, means what its codes say, and reports what it cost."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from localspec.commands.library import import_
from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, mtp
from localspec.engine.packed_weights import can_pack
from localspec.formats import compact as quantiser
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.hub import calibration, compact, compact_report, layout
from localspec.hub.calibration import agreement
from localspec.hub.compact import CompactOptions, compact_model
from localspec.hub.local import list_installed, verify
from localspec.hub.records import HubError
from localspec.kernels.fp8_pack import quantise_fp8
from localspec.kernels.nvfp4_pack import Nvfp4Weight, quantise_nvfp4
from localspec.models import architectures
from tests.helpers.models import Driver, load_model, random_checkpoint, reference_ops
from tests.helpers.tiny_text import tiny_text_model

pytestmark = pytest.mark.torch
UNMEASURED = CompactOptions(measure=False)
IDS = [7 * i % 100 for i in range(70)]


@pytest.fixture(autouse=True)
def _few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix takes a pass over all of them."""
    monkeypatch.setattr(calibration, "MAX_CALIBRATION_WINDOWS", 3)


def tiny_model(name: str, seed: int, folder: Path) -> Path:
    """Whole blocks of 16 columns nearly everywhere; the hybrids keep a down projection and an output of odd width."""
    tiny_text_model(name, seed, folder)
    config = read_config(folder)
    if "qwen3_5" not in name:
        config |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        config |= {"head_dim": 16} if "head_dim" in config else {}
    return random_checkpoint(name, seed, folder, config)


def add_mtp(folder: Path) -> None:
    shapes = mtp.tiny_shapes(mtp.shape_of(read_config(folder)))
    generator = torch.Generator().manual_seed(11)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def logits(folder: Path) -> torch.Tensor:
    return Driver(load_model(folder)).prefill(0, IDS)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    real = torch.isfinite(wanted)
    return float((found[real] - wanted[real]).norm() / wanted[real].norm())


def load_names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", architectures())
def test_every_architecture_compacts_and_runs(name: str, tmp_path: Path) -> None:
    source = tiny_model(name, 5, tmp_path / f"Tiny_{name}")
    result = compact_model(source, tmp_path / "data", CompactOptions())
    assert result.model_id == f"tiny_{name}-nvfp4" and verify(tmp_path / "data", result.model_id) == ()
    tensors = {each["name"]: each for each in result.report["tensors"]}
    before = load_file(source / "model.safetensors")
    for each, tensor in before.items():
        if tensor.ndim == 2:
            keeps = tensor.shape[1] % 16 or any(part in each for part in ("embed", "in_proj_a", "in_proj_b"))
            assert tensors[each]["after"] == ("f32" if keeps else "nvfp4"), each
            assert keeps or 19 < tensors[each]["sqnr_db"] < 25
    # The same model from the values that the codes mean: packing, names and settings add nothing to the error.
    checkpoint = open_checkpoint(result.directory)
    vectors = {each: tensor for each, tensor in before.items() if tensor.ndim != 2}
    values = {**vectors, **{each: checkpoint.weight(each).dequantise() for each in tensors}}
    meant = tmp_path / "meant"
    meant.mkdir()
    config = {key: value for key, value in read_config(result.directory).items() if key != "quantization_config"}
    (meant / "config.json").write_text(json.dumps(config))
    save_file(values, meant / "model.safetensors")
    found, wanted = logits(result.directory), logits(source)
    assert torch.equal(found, logits(meant))
    # 21.8 dB are 8% of each product; errors of independent matrices add as squares, twice that for the recurrences.
    num_changed = sum(each["after"] == "nvfp4" for each in tensors.values())
    assert 0.02 < relative_error(found, wanted) < 2 * 0.08 * num_changed**0.5
    measured = result.report["agreement"]
    assert measured["held_out_tokens"] == 2 * calibration.WINDOW_TOKENS and 0.2 < measured["same_top_1"] < 1
    assert 0 < measured["mean_kl_nats"] < 1


def test_multi_token_prediction_is_compacted_and_drafts(tmp_path: Path) -> None:
    source = tiny_model("qwen3_5", 5, tmp_path / "hybrid")
    add_mtp(source)
    result = compact_model(source, tmp_path / "data", UNMEASURED)
    names = load_names(result.directory)
    assert {"mtp.fc.weight_scale_2", "mtp.layers.0.self_attn.q_proj.weight_scale"} <= names
    checkpoint = open_checkpoint(result.directory)
    model = load_model(result.directory)
    setup = DrafterSetup(
        ops=reference_ops(),
        model=model,
        num_slots=MAX_SLOTS,
        context_limit_tokens=128,
        ngram_tables=(),
        checkpoint=checkpoint,
        folder=result.directory,
    )
    assert mtp.build(setup) is not None
    # Neither the block nor one row of the embedding is read for each token of the target.
    text = [t for t in result.report["tensors"] if not t["name"].startswith("mtp.") and "embed" not in t["name"]]
    stored = load_file(source / "model.safetensors").items()
    vectors = sum(tensor.nbytes for name, tensor in stored if tensor.ndim != 2 and "mtp" not in name)
    assert result.report["bytes_per_token"]["before"] == sum(t["bytes_before"] for t in text) + vectors


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
def test_a_tied_head_stays_the_embedding(name: str, tmp_path: Path) -> None:
    source = tiny_model(name, 5, tmp_path / "tied")
    config, tensors = read_config(source), load_file(source / "model.safetensors")
    config["tie_word_embeddings"] = True
    (source / "config.json").write_text(json.dumps(config))
    tensors.pop("lm_head.weight", None)
    save_file(tensors, source / "model.safetensors")
    result = compact_model(source, tmp_path / "data", UNMEASURED)
    assert "lm_head.weight" not in load_names(result.directory)
    # All of it is read for each token.
    assert result.report["bytes_per_token"]["before"] == sum(tensor.nbytes for tensor in tensors.values())
    assert relative_error(logits(result.directory), logits(source)) < 1


def mixed_source(folder: Path) -> tuple[Path, dict[str, Nvfp4Weight]]:
    """A ModelOpt checkpoint: NVFP4 MLP with scales of activations, FP8 attention, an AWQ scale, BF16 rest."""
    tiny_model("qwen3", 6, folder)
    stored: dict[str, torch.Tensor] = {}
    packed: dict[str, Nvfp4Weight] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if "gate_proj" in name or "up_proj" in name:
            packed[name] = weight = quantise_nvfp4(tensor, "max")
            stored |= {name: weight.codes, f"{name}_scale": weight.block_scale, f"{module}.input_scale": torch.ones(())}
            stored[f"{name}_scale_2"] = weight.row_scale[0].clone()
            if "layers.1.mlp.up" in name:
                stored[f"{module}.pre_quant_scale"] = torch.full((tensor.shape[1],), 2.0)
                del packed[name]
        elif "self_attn" in name and tensor.ndim == 2:
            fp8 = quantise_fp8(tensor)
            stored |= {name: fp8.codes, f"{name}_scale": fp8.row_scale}
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, folder / "model.safetensors")
    config = read_config(folder)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, packed


def test_nvfp4_keeps_its_bits_and_leftovers_change(tmp_path: Path) -> None:
    source, packed = mixed_source(tmp_path / "mixed")
    result = compact_model(source, tmp_path / "data", UNMEASURED)
    after = load_file(result.directory / "model.safetensors")
    assert packed
    for name, weight in packed.items():
        assert torch.equal(after[name], weight.codes)
        assert torch.equal(after[f"{name}_scale"].view(torch.uint8), weight.block_scale.view(torch.uint8))
    forms = {each["name"]: (each["before"], each["after"]) for each in result.report["tensors"]}
    assert forms["model.layers.0.self_attn.q_proj.weight"] == ("fp8", "nvfp4")
    assert forms["model.layers.0.mlp.up_proj.weight"] == ("nvfp4", "nvfp4")
    assert forms["model.embed_tokens.weight"] == ("bf16", "bf16")
    assert not [name for name in after if name.endswith((".input_scale", ".pre_quant_scale"))]
    settings = json.loads((result.directory / "hf_quant_config.json").read_text())["quantization"]
    assert settings["quant_algo"] == "W4A16_NVFP4" and "model.embed_tokens" in settings["exclude_modules"]
    assert relative_error(logits(result.directory), logits(source)) < 0.5


def test_block_and_fp8_grid_sources(tmp_path: Path) -> None:
    source = tiny_model("llama", 7, tmp_path / "fp8")
    tensors = load_file(source / "model.safetensors")
    stored = dict(tensors)
    name = "model.layers.0.mlp.gate_proj.weight"
    codes = quantise_fp8(tensors[name])
    stored |= {name: codes.codes, f"{name}_scale_inv": torch.full((-(-codes.shape[0] // 128), 1), 0.03)}
    save_file(stored, source / "model.safetensors")
    config = read_config(source)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    result = compact_model(source, tmp_path / "data", UNMEASURED)
    want = codes.codes.float() * 0.03
    got = open_checkpoint(result.directory).weight(name).dequantise()
    assert relative_error(got, want) < 0.09


def test_rows_of_fp8_blocks_are_their_rows() -> None:
    codes = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    blocks = torch.rand(3, 2, generator=torch.Generator().manual_seed(2))
    weight = quantise_fp8(codes.float())
    weight = type(weight)(codes, torch.ones(300), blocks)
    parts = [slice(0, 128), slice(128, 300)]
    together = torch.cat([quantiser.rows_of(weight, part).dequantise() for part in parts])
    assert torch.equal(together, weight.dequantise())


def test_slabs_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("qwen2", 8, tmp_path / "model")
    whole = compact_model(source, tmp_path / "data", UNMEASURED)
    monkeypatch.setattr(quantiser, "SLAB_VALUES", 1)
    monkeypatch.setattr(quantiser, "SLAB_ROW_MULTIPLE", 32)
    monkeypatch.setattr(compact, "SHARD_BYTES", 4000)
    parts = compact_model(source, tmp_path / "data", CompactOptions("parts", measure=False))
    files = sorted(parts.directory.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((parts.directory / "model.safetensors.index.json").read_text())
    wanted = load_file(whole.directory / "model.safetensors")
    assert index["weight_map"].keys() == wanted.keys()
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in wanted.items())


def test_importance_comes_from_what_a_matrix_sees(tmp_path: Path) -> None:
    source = tiny_model("qwen3_5", 9, tmp_path / "model")
    model = calibration.TextModel(source, "cpu")
    window = tuple(range(64))
    found = model.mean_squares([window])
    names = {name for name, tensor in load_file(source / "model.safetensors").items() if tensor.ndim == 2}
    assert set(found) == {name for name in names if "embed" not in name}
    # The first matrices see the normed embedding of the window.
    tensors = load_file(source / "model.safetensors")
    x = tensors["model.language_model.embed_tokens.weight"][:64]
    w = 1 + tensors["model.language_model.layers.0.input_layernorm.weight"]
    normed = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6) * w
    key = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    torch.testing.assert_close(found[key], normed.square().mean(dim=0))


def test_feedback_lowers_what_the_text_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("qwen3_5", 12, tmp_path / "model")
    add_mtp(source)
    plain = compact_model(source, tmp_path / "data", CompactOptions())
    # Room for the moments of two matrices, so that they are gathered many times.
    monkeypatch.setattr(compact, "MOMENT_BYTES", 2 * 4 * 64 * 64)
    fed = compact_model(source, tmp_path / "data", CompactOptions("fed", feedback=True))
    assert fed.report["bits_per_weight"] == plain.report["bits_per_weight"] and fed.report["feedback"]
    name = "model.language_model.layers.0.mlp.gate_proj.weight"
    values = load_file(source / "model.safetensors")[name]
    texts = calibration.read_texts(source, None).calibration
    moments = calibration.TextModel(source, "cpu").second_moments(texts, frozenset({name}))
    assert moments.keys() == {name}
    errors = []
    for result in (plain, fed):
        lost = open_checkpoint(result.directory).weight(name).dequantise() - values
        errors.append(float((lost @ moments[name] * lost).sum()))
    assert errors[1] < 0.8 * errors[0]


def test_agreement_of_known_distributions() -> None:
    source = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]).log()
    other = torch.tensor([[0.25, 0.75, 0.0], [0.9, 0.1, 0.0]]).log()
    found = agreement([source], [other])
    assert found.mean_kl == pytest.approx((0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()) / 2)
    assert found.top_1 == 0.5 and found.num_tokens == 2


def test_a_budget_buys_wider_matrices(tmp_path: Path) -> None:
    source = tiny_model("qwen3", 10, tmp_path / "model")
    result = compact_model(source, tmp_path / "data", CompactOptions(bits_per_weight=6.0, measure=False))
    forms = [each["after"] for each in result.report["tensors"]]
    assert {"nvfp4", "fp8"} <= set(forms)
    changed = [t for t in result.report["tensors"] if t["after"] in ("nvfp4", "fp8")]
    bits = 8 * sum(t["bytes_after"] for t in changed) / sum(t["shape"][0] * t["shape"][1] for t in changed)
    # Row scales of such narrow matrices take half a bit beyond the plan.
    assert 5.2 < bits < 6.8
    settings = read_config(result.directory)["quantization_config"]
    assert settings["quant_algo"] == "MIXED_PRECISION"
    narrow = compact_model(source, tmp_path / "data", CompactOptions("narrow", measure=False))
    wanted = logits(source)
    assert relative_error(logits(result.directory), wanted) < relative_error(logits(narrow.directory), wanted)


def test_losses_are_what_a_group_costs_alone(tmp_path: Path) -> None:
    """Beside whole models in which only that group was narrowed; the model is as before afterwards."""
    source = tiny_model("qwen3", 10, tmp_path / "model")
    model, window = calibration.TextModel(source, "cpu"), tuple(range(3, 60))
    before = model.log_probs(window)

    def narrow(name: str, weight: object) -> object:
        return quantise_nvfp4(weight.dequantise()) if "layers.0." in name else None  # type: ignore[attr-defined]

    losses = model.losses([window], narrow)  # type: ignore[arg-type]
    assert torch.equal(model.log_probs(window), before)
    at = "model.layers.0."
    assert {name for names in losses for name in names} == {f"{at}self_attn.{part}_proj.weight" for part in "qkvo"} | {
        f"{at}mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    group = tuple(f"{at}self_attn.{part}_proj.weight" for part in "qkv")
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: quantise_nvfp4(tensors[name]).dequantise().contiguous() for name in group}
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in source.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    save_file(tensors, changed / "model.safetensors")
    other = calibration.TextModel(changed, "cpu").log_probs(window)
    assert losses[group] == pytest.approx(agreement([before], [other]).mean_kl, rel=1e-3)
    same = model.losses([window], lambda name, weight: weight)
    assert same and max(same.values()) == pytest.approx(0.0, abs=1e-9)


def test_a_budget_goes_where_the_loss_is(tmp_path: Path) -> None:
    source = tiny_model("llama", 3, tmp_path / "model")
    with closing(open_checkpoint(source)) as checkpoint:
        stored = quantiser.survey(checkpoint)
        at = "model.layers.1.mlp."
        costly, cheap = (f"{at}gate_proj.weight", f"{at}up_proj.weight"), ("model.layers.0.self_attn.o_proj.weight",)
        chosen = compact_report.allocate(checkpoint, stored, {}, 5.2, {costly: 1.0, cheap: 0.001})
    forms = {each.name: each.choice for each in chosen}
    assert forms[costly[0]] == forms[costly[1]] == "fp8"
    assert forms["model.layers.0.mlp.down_proj.weight"] == "nvfp4"  # of no group, so nothing speaks for it


def test_a_budget_in_bytes_is_kept(tmp_path: Path) -> None:
    source = tiny_model("qwen3", 10, tmp_path / "model")
    plain = compact_model(source, tmp_path / "data", CompactOptions("plain", measure=False)).report
    least = plain["total_bytes"]["after"]
    budget = least + least // 10
    result = compact_model(source, tmp_path / "data", CompactOptions("mixed", budget_bytes=budget, measure=False))
    # Row scales of such narrow matrices are the part that the plan leaves out.
    assert least < result.report["total_bytes"]["after"] < 1.05 * budget
    assert {"nvfp4", "fp8"} <= {each["after"] for each in result.report["tensors"]}
    with pytest.raises(HubError, match=r"a budget of 0\.00 GiB is below the 0\.00 GiB that NVFP4"):
        compact_model(source, tmp_path / "data", CompactOptions("less", budget_bytes=1000, measure=False))


def nothing_installed(data: Path) -> bool:
    return list_installed(data) == () and not list((data / "models").glob("*"))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    source = tiny_model("qwen2", 1, tmp_path / "model")
    with pytest.raises(HubError, match=r"neither a folder .* nor an installed model"):
        compact_model(tmp_path / "absent", data, UNMEASURED)
    with pytest.raises(HubError, match="import it first"):
        compact_model(source / "config.json", data, UNMEASURED)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match=r"has no config\.json"):
        compact_model(tmp_path / "empty", data, UNMEASURED)
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(HubError, match="is too short"):
        compact_model(source, data, CompactOptions(calibration=tmp_path / "short.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 900)
    with pytest.raises(HubError, match="is not UTF-8"):
        compact_model(source, data, CompactOptions(calibration=tmp_path / "binary.txt"))
    monkeypatch.setattr(layout, "free_bytes", lambda directory: 1000)
    with pytest.raises(HubError, match="GB are free") as caught:
        compact_model(source, data, UNMEASURED)
    assert caught.value.exit_code == 3 and nothing_installed(data)


@pytest.mark.parametrize("damage", ["header", "cut", "nan", "part", "shape", "stray"])
def test_a_damaged_source_installs_nothing(damage: str, tmp_path: Path) -> None:
    source, _ = mixed_source(tmp_path / "model")
    path = source / "model.safetensors"
    tensors = load_file(path)
    if damage == "header":
        path.write_bytes(b"\xff" * 64)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "nan":
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.full((64, 96), float("nan"), dtype=torch.bfloat16)
        save_file(tensors, path)
    elif damage == "part":
        del tensors["model.layers.0.mlp.gate_proj.weight_scale_2"]
        save_file(tensors, path)
    elif damage == "stray":
        # Of a plain weight, which is not read with it: the copy would answer as another model.
        tensors["model.layers.1.mlp.down_proj.pre_quant_scale"] = torch.full((96,), 2.0)
        save_file(tensors, path)
    else:
        tensors["model.layers.0.mlp.gate_proj.weight_scale"] = torch.ones(3, 4).to(torch.float8_e4m3fn)
        save_file(tensors, path)
    with pytest.raises(HubError, match="cannot be compacted"):
        compact_model(source, tmp_path / "data", UNMEASURED)
    assert nothing_installed(tmp_path / "data")


def test_a_matrix_without_values_is_kept(tmp_path: Path) -> None:
    source = tiny_model("qwen2", 1, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "a.weight": torch.zeros(0, 16), "b.weight": torch.zeros(16, 0)}, source / "model.safetensors")
    result = compact_model(source, tmp_path / "data", UNMEASURED)
    assert {"a.weight", "b.weight"} <= load_names(result.directory)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("qwen2", 1, tmp_path / "model")

    def full(path: Path, items: Iterable[Any], metadata: dict[str, str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compact, "write_safetensors", full)
    with pytest.raises(HubError, match="the disk is full") as caught:
        compact_model(source, tmp_path / "data", UNMEASURED)
    assert caught.value.exit_code == 3 and nothing_installed(tmp_path / "data")


def test_too_little_memory_to_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("qwen2", 1, tmp_path / "model")
    monkeypatch.setattr(compact, "RUNNING_BYTES_PER_WEIGHT", 1e9)
    result = compact_model(source, tmp_path / "data", CompactOptions())
    assert result.report["agreement"] is None and "not measured" in result.report["note"]
    (tmp_path / "text.txt").write_text("word " * 3000)
    with pytest.raises(HubError, match="cannot be calibrated here") as caught:
        compact_model(source, tmp_path / "data", CompactOptions("other", calibration=tmp_path / "text.txt"))
    assert caught.value.exit_code == 3


def command(home: Path, *arguments: str) -> Result:
    return CliRunner(env={"LOCALSPEC_HOME": str(home)}).invoke(import_, list(arguments), standalone_mode=False)


def test_command(tmp_path: Path) -> None:
    source = tiny_model("qwen2", 1, tmp_path / "model")
    (tmp_path / "text.txt").write_text("Some words about nothing in particular, again and again. " * 60)
    home = tmp_path / "home"
    done = command(home, str(source), "--compact", "--calibration", str(tmp_path / "text.txt"), "--device", "cpu")
    assert done.exception is None, done.exception
    assert "model-nvfp4: ready" in done.output and "KL 0." in done.output and "bits per weight: " in done.output
    text = ("--calibration", str(tmp_path / "text.txt"), "--device", "cpu")
    gptq = command(home, str(source), "--compact", "--gptq", "--name", "g", "--json", *text)
    assert gptq.exception is None and json.loads(gptq.stdout)["report"]["feedback"] is True
    # An installed model goes by its id; NVFP4 parts stay as they are.
    again = command(home, "model-nvfp4", "--compact", "--name", "again", "--json", "--device", "cpu")
    assert again.exception is None, again.exception
    document = json.loads(again.stdout)
    report = document["report"]
    # The weights as a card's kernels read them lie beside the model, and are no foreign file to `verify`.
    [kept] = (home / "models" / "again").glob("weights.packed") if can_pack() else [None]
    assert document["packed_bytes"] == (kept.stat().st_size if kept else 0)
    assert verify(home, "again") == ()
    assert report["agreement"]["mean_kl_nats"] == pytest.approx(0, abs=1e-6)
    for arguments, words, code in (
        ((str(source), "--bits", "5"), "belong to --compact", 2),
        ((str(source), "--compact", "--bits", "3"), "NVFP4 takes 4.5", 2),
        ((str(source), "--gptq"), "belong to --compact", 2),
        ((str(source), "--compact", "--bits", "5", "--budget-gib", "1"), "give one of them", 2),
        ((str(source), "--compact", "--budget-gib", "-1"), "give a size in GiB", 2),
        ((str(source), "--compact", "--budget-gib", "0.00001", "--name", "b", "--device", "cpu"), "is below the", 1),
        ((str(source), "--compact", "--device", "cpu"), "already installed", 1),
    ):
        failed = command(home, *arguments)
        assert words in str(failed.exception) and getattr(failed.exception, "exit_code", 0) == code
