"""What every architecture must hold, whichever it is: new files are tested without a new test.

Bits are compared, not tolerances: the reference back end promises them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localspec.core.records import HiddenNeeds
from localspec.models import Model, architecture, architectures
from tests.helpers.models import Driver, load_model, make_rows, random_checkpoint

pytestmark = pytest.mark.torch
LENGTH = 300
"""More than one split of keys and not a multiple of anything."""


def _ids(seed: int, count: int = LENGTH) -> list[int]:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=architectures())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(random_checkpoint(request.param, 11, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def whole(model: Model) -> torch.Tensor:
    """Logits of one prefill of everything: what all other ways of feeding must equal."""
    return Driver(model).prefill(0, _ids(0))


def test_sizes_and_cache_spec(model: Model) -> None:
    assert model.num_layers >= 2 and model.max_context_tokens == 4096 and model.read_bytes_per_token > 0
    names = [entry.name for entry in (*model.cache_spec.planes, *model.cache_spec.states)]
    assert len(names) == len(set(names)) and model.cache_spec.owner == "target" and model.cache_spec.fingerprint
    assert model.embed(torch.tensor([1, 2, 3])).shape == (3, model.hidden_size)


def test_logits_are_float32_and_never_nan(model: Model, whole: torch.Tensor) -> None:
    assert whole.dtype == torch.float32 and whole.shape == (LENGTH, model.vocab_size)
    assert not whole.isnan().any() and whole.isfinite().any(dim=1).all()
    assert whole[:, :128].std() > 0.1, "the random model says the same everywhere: the tests below would prove nothing"


@pytest.mark.parametrize(("chunk", "scattered"), [(64, False), (100, True), (255, False), (255, True), (7, False)])
def test_chunks_of_any_size_give_the_same_bits(model: Model, whole: torch.Tensor, chunk: int, scattered: bool) -> None:
    driver = Driver(model, scattered=scattered)
    assert torch.equal(driver.prefill(2, _ids(0), chunk, padding=(1, 2)), whole)


def test_a_pass_cut_between_layers_gives_the_same_bits_while_others_run(model: Model, whole: torch.Tensor) -> None:
    """Of two chunks, the second after a window; other slots are verified and folded between any two layers."""
    other, own = _ids(1, 200), _ids(0)
    alone = Driver(model).prefill(2, other)
    driver = Driver(model, scattered=True, needs=HiddenNeeds(layer_outputs=(0, model.num_layers - 1)))
    driver.prefill(2, other[:100])
    at = 100
    for start, end in ((0, 256), (256, LENGTH)):
        rows = make_rows("prefill", {0: (start, own[start:end])}, driver.block_tables, driver.pending.clone())
        under_way = model.begin(rows, driver.cache, driver.needs)
        while (forward := model.advance(under_way, 1)) is None:
            window = other[at : at + 2] + _wrong(other[at + 2 : at + 4])
            assert torch.equal(driver.verify({2: window}, {2: 2})[2][:2], alone[at : at + 2])
            at += 2
            if at % 8:
                driver.fold()
        driver.lengths[0] = end
        assert torch.equal(model.logits(forward.hidden[: end - start]), whole[start:end])
        wanted = model.forward(
            make_rows("prefill", {3: (0, own[:end])}, driver.block_tables, driver.pending.clone()),
            driver.cache,
            driver.needs,
        )
        for layer, output in wanted.layer_outputs.items():
            assert torch.equal(forward.layer_outputs[layer][: end - start], output[start:end])
        for spec in model.cache_spec.states:
            driver.cache.states[spec.name][3] = 0


def test_step_by_step_gives_the_same_bits(model: Model, whole: torch.Tensor) -> None:
    driver, ids = Driver(model), _ids(0)
    head = driver.prefill(1, ids[:210])
    steps = [driver.verify({1: [token]})[1] for token in ids[210:]]
    assert torch.equal(torch.cat([head, *steps]), whole)


@pytest.mark.parametrize("width", range(1, 17))
def test_a_window_of_any_width_gives_the_same_bits(model: Model, whole: torch.Tensor, width: int) -> None:
    ids = _ids(0)
    driver = Driver(model)
    driver.prefill(0, ids[:245])
    first = driver.verify({0: ids[245 : 245 + width]}, padding=(0, 16 - width))[0]
    then = driver.verify({0: ids[245 + width : 245 + width + 5]})[0]
    assert torch.equal(torch.cat((first, then)), whole[245 : 250 + width])


def test_more_threads_keep_a_rows_bits(model: Model) -> None:
    ids = _ids(0, 280)
    torch.set_num_threads(3)
    try:
        whole = Driver(model).prefill(0, ids)
        for width in (1, 3, 8, 16):
            driver = Driver(model)
            driver.prefill(1, ids[:250], 100)
            assert torch.equal(driver.verify({1: ids[250 : 250 + width]})[1], whole[250 : 250 + width]), width
    finally:
        torch.set_num_threads(1)


def _wrong(tokens: list[int]) -> list[int]:
    return [(token + 1) % 128 for token in tokens]


@pytest.mark.parametrize("seed", range(3))
def test_rejected_rows_leave_no_trace(model: Model, whole: torch.Tensor, seed: int) -> None:
    driver, ids, at = Driver(model, scattered=seed == 1), _ids(0), 200
    generator = torch.Generator().manual_seed(seed)
    driver.prefill(3, ids[:at])
    while at < LENGTH:
        width = min(int(torch.randint(1, 17, (), generator=generator)), LENGTH - at)
        kept = int(torch.randint(1, width + 1, (), generator=generator))
        window = ids[at : at + kept] + _wrong(ids[at + kept : at + width])
        got = driver.verify({3: window}, {3: kept}, padding=(seed, 0))[3][:kept]
        assert torch.equal(got, whole[at : at + kept])
        at += kept


def test_prefill_after_a_window_folds_first(model: Model, whole: torch.Tensor) -> None:
    driver, ids = Driver(model), _ids(0)
    driver.prefill(0, ids[:100])
    driver.verify({0: ids[100:104] + _wrong(ids[104:110])}, {0: 4})
    assert torch.equal(driver.prefill(0, ids[104:200], 50), whole[104:200])


def test_an_explicit_fold_changes_nothing_that_follows(model: Model, whole: torch.Tensor) -> None:
    driver, ids = Driver(model), _ids(0)
    driver.prefill(0, ids[:50])
    for at in range(50, 110, 6):
        driver.verify({0: ids[at : at + 6] + _wrong(ids[at + 6 : at + 9])}, {0: 6})
        if at % 4:
            driver.fold()
    assert torch.equal(driver.verify({0: ids[110:115]})[0], whole[110:115])


def test_states_can_be_saved_after_a_fold_and_restored_elsewhere(model: Model, whole: torch.Tensor) -> None:
    driver, ids = Driver(model), _ids(0)
    driver.prefill(0, ids[:120])
    driver.verify({0: ids[120:128] + _wrong(ids[128:130])}, {0: 8})
    driver.fold()
    for spec in model.cache_spec.states:
        state = driver.cache.states[spec.name]
        state[3] = 0.0 if spec.ring_rows else state[0]
    driver.block_tables[3], driver.lengths[3] = driver.block_tables[0].clone(), driver.lengths[0]
    assert torch.equal(driver.verify({3: ids[128:135]})[3], whole[128:135])


def test_four_slots_in_one_step_are_four_sequences(model: Model) -> None:
    texts = [_ids(seed, 60) for seed in range(4)]
    alone = [Driver(model).prefill(0, text) for text in texts]
    driver = Driver(model, scattered=True)
    starts = (20, 33, 7, 40)
    for slot, start in enumerate(starts):
        driver.prefill(slot, texts[slot][:start], 16)
    at = list(starts)
    for order, widths in (((2, 0, 3, 1), (4, 1, 7, 4)), ((3, 1), (9, 7)), ((0, 1, 2, 3), (4, 4, 4, 4))):
        windows = {slot: texts[slot][at[slot] : at[slot] + width] for slot, width in zip(order, widths, strict=True)}
        kept = {slot: max(1, len(window) - slot) for slot, window in windows.items()}
        got = driver.verify(windows, kept)
        for slot, window in windows.items():
            assert torch.equal(got[slot], alone[slot][at[slot] : at[slot] + len(window)]), f"slot {slot}"
            at[slot] += kept[slot]


def test_padding_rows_change_nothing(model: Model) -> None:
    ids = _ids(5, 40)

    def caches(padding: tuple[int, int]) -> dict[str, torch.Tensor]:
        driver = Driver(model)
        driver.prefill(1, ids[:30], padding=padding)
        driver.verify({1: ids[30:35]}, padding=padding)
        # Page 0 is where rows that must not be kept may write.
        return {name: plane[1:] for name, plane in driver.cache.planes.items()} | driver.cache.states

    plain, padded = caches((0, 0)), caches((3, 5))
    assert plain and all(torch.equal(plain[name], padded[name]) for name in plain)
    empty = Driver(model)
    before = {name: value.clone() for name, value in empty.cache.states.items()}
    rows = make_rows("verify", {}, empty.block_tables, padding=(2, 2))
    model.logits(model.forward(rows, empty.cache, HiddenNeeds()).hidden)
    assert all(torch.equal(value, before[name]) for name, value in empty.cache.states.items())
    assert not any(plane[1:].any() for plane in empty.cache.planes.values())


def test_taps_are_the_residual_stream_after_each_layer(model: Model) -> None:
    driver, ids = Driver(model), _ids(6, 20)
    rows = make_rows("prefill", {0: (0, ids)}, driver.block_tables)
    last = model.num_layers - 1
    asked = model.forward(rows, driver.cache, HiddenNeeds(True, (0, last)))
    plain = model.forward(rows, Driver(model).cache, HiddenNeeds())
    assert set(asked.layer_outputs) == {0, last} and not plain.layer_outputs
    assert torch.equal(asked.hidden, plain.hidden)
    assert asked.layer_outputs[0].shape == (20, model.hidden_size)
    assert not torch.equal(asked.layer_outputs[0], asked.layer_outputs[last])
    with pytest.raises(ValueError, match=str(model.num_layers)):
        model.forward(rows, driver.cache, HiddenNeeds(layer_outputs=(model.num_layers,)))


@pytest.mark.parametrize("name", architectures())
def test_unknown_settings_and_tensors_fail_by_name(name: str, tmp_path: Path) -> None:
    config = architecture(name).tiny_config()
    text = config.get("text_config", config)
    text["router_jitter"] = 0.5
    with pytest.raises(ValueError, match="router_jitter"):
        load_model(random_checkpoint(name, 1, tmp_path / "a", config))
    del text["router_jitter"]
    changes: list[Callable[[], None]] = [
        lambda: text.update(hidden_act="gelu"),
        lambda: text.update(hidden_size=-3),
        lambda: text.update(num_hidden_layers="many"),
        lambda: text.update(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
    ]
    good = random_checkpoint(name, 1, tmp_path / "b", config)
    for change, word in zip(changes, ("hidden_act", "hidden_size", "num_hidden_layers", "longrope"), strict=True):
        kept = dict(text)
        change()
        (good / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=word):
            load_model(good)
        text.clear()
        text.update(kept)
    (good / "config.json").write_text(json.dumps(config))
    save_file({"model.layers.0.mlp.router.weight": torch.ones(2, 2)}, good / "more.safetensors")
    with pytest.raises(ValueError, match="router"):
        load_model(good)
