"""The `localspec-blocks` reader on hand-made tensors; that whole files convert exactly is tests/hub/test_convert.py."""

from __future__ import annotations

import pytest
import torch

from localspec.formats.blocks import dequantise, is_quantised, methods_by_name, unpack_codes

pytestmark = pytest.mark.torch


def sample(n_rows: int, n_columns: int, bits: int, with_min: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_rows * 31 + bits)
    shape = (n_rows, n_columns // 32)
    tensors = {"w.scale": torch.randn(shape, generator=generator).half()}
    if bits == 8:
        tensors["w.q"] = torch.randint(-128, 128, (n_rows, n_columns), generator=generator, dtype=torch.int8)
    else:
        tensors["w.q"] = torch.randint(0, 256, (n_rows, n_columns // 2), generator=generator, dtype=torch.uint8)
    if with_min:
        tensors["w.min"] = torch.randn(shape, generator=generator).half()
    return tensors


def value_at(tensors: dict[str, torch.Tensor], row: int, column: int) -> float:
    """One value by the definition, in float32 with the two roundings of the format."""
    codes = tensors["w.q"]
    if codes.dtype == torch.int8:
        code = int(codes[row, column])
    else:
        code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
        code -= 0 if "w.min" in tensors else 8
    value = tensors["w.scale"][row, column // 32].float() * torch.tensor(float(code))
    if "w.min" in tensors:
        value = value + tensors["w.min"][row, column // 32].float()
    return float(value)


@pytest.mark.parametrize(("bits", "with_min"), [(4, False), (4, True), (8, False)], ids=["q4_0", "q4_1", "q8_0"])
def test_values_follow_the_definition(bits: int, with_min: bool) -> None:
    tensors = sample(7, 96, bits, with_min)
    values = dequantise(tensors, "w")
    assert values.dtype == torch.float32
    expected = torch.tensor([[value_at(tensors, r, c) for c in range(96)] for r in range(7)])
    assert torch.equal(values, expected)


def test_low_nibble_comes_first() -> None:
    assert unpack_codes(torch.tensor([[0x21, 0x43]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 4]]


def test_is_quantised() -> None:
    tensors = sample(1, 32, 4, True)
    assert is_quantised(tensors, "w")
    assert not is_quantised({"w": torch.zeros(1)}, "w")


def test_parts_that_do_not_fit_are_refused() -> None:
    tensors = sample(3, 64, 4, True)
    with pytest.raises(ValueError, match="w: scales of shape"):
        dequantise({**tensors, "w.scale": tensors["w.scale"][:, :1]}, "w")
    with pytest.raises(ValueError, match=r"w\.min of shape"):
        dequantise({**tensors, "w.min": tensors["w.min"][:2]}, "w")
    with pytest.raises(ValueError, match=r"w\.q has dtype"):
        dequantise({**tensors, "w.q": tensors["w.q"].short()}, "w")
    with pytest.raises(KeyError):
        dequantise({"w.q": tensors["w.q"]}, "w")


def test_config_names_methods_and_refuses_unknown_ones() -> None:
    config = {"quant_method": "localspec-blocks", "tensors": {"w": "q4_1"}}
    assert methods_by_name(config) == {"w": "q4_1"}
    for change, message in (
        ({"quant_method": "awq"}, "awq"),
        ({"tensors": {"w": "q3_9"}}, "q3_9"),
        ({"tensors": None}, "tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            methods_by_name({**config, **change})
