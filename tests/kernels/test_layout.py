"""Sizes and offsets of octets and activation rows."""

import subprocess
import sys

import gguf
import pytest

from strata_jit.errors import ModelError
from strata_jit.kernels import layout

# header and payload of one octet, counted by hand from the description in docs/kernels.md
OCTET_BYTES = [
    ("IQ4_XS", 256, 64 + 1088),
    ("IQ4_XS", 1024, 64 + 4 * 1088),
    ("IQ4_XS", 2048, 128 + 8 * 1088),
    ("IQ4_NL", 32, 64 + 128),
    ("IQ4_NL", 640, 320 + 20 * 128),
    ("IQ4_NL", 768, 384 + 24 * 128),
    ("Q4_K", 256, 64 + 1152),
    ("Q4_K", 768, 128 + 3 * 1152),
    ("Q5_K", 2048, 256 + 8 * 1408),
    ("Q6_K", 256, 64 + 1664),
    ("IQ3_XXS", 256, 64 + 1088),
    ("IQ3_S", 1024, 64 + 4 * 1088),
    ("MXFP4", 32, 64 + 128),
    ("MXFP4", 640, 192 + 20 * 128),
    ("Q2_K", 768, 128 + 3 * 640),
    ("Q3_K", 1024, 64 + 4 * 896),
    ("Q4_0", 64, 64 + 2 * 128),
    ("Q4_1", 96, 128 + 3 * 128),
    ("Q5_0", 160, 128 + 5 * 160 + 32),
    ("Q5_1", 64, 64 + 2 * 160),
    ("F16", 4, 64),
    ("F16", 2560, 8 * 2 * 2560),
    ("Q8_0", 32, 64 + 256),
    ("Q8_0", 2048, 1024 + 64 * 256),
    ("BF16", 4, 64),
    ("BF16", 2560, 8 * 2 * 2560),
    ("F32", 4, 128),
    ("F32", 2560, 8 * 4 * 2560),
]


@pytest.mark.parametrize(("name", "n_cols", "expected"), OCTET_BYTES)
def test_octet_bytes(name, n_cols, expected):
    assert layout.octet_bytes(name, n_cols) == expected
    assert layout.octet_bytes(name, n_cols) % layout.ALIGN == 0
    assert layout.header_bytes(name, n_cols) % layout.ALIGN == 0


def test_octet_bytes_within_4_percent_of_the_file():
    """But IQ3, whose weights take 4 bits instead of 3 to 3.5."""
    for name, store in layout.STORE_TYPES.items():
        file_bytes = 8 * layout.CONVERSIONS[name].block_bytes * (2048 // store.block_cols)
        most = {"IQ3_XXS": 1.42, "IQ3_S": 1.26}.get(name, 1.04)
        assert file_bytes <= layout.octet_bytes(name, 2048) <= most * file_bytes


def test_matrix_bytes_rounds_rows_up():
    one = layout.octet_bytes("Q6_K", 512)
    assert [layout.matrix_bytes("Q6_K", n, 512) for n in (0, 1, 8, 9, 23)] == [0, one, one, 2 * one, 3 * one]


def test_act_planes():
    assert layout.act_planes("F32", 20) == layout.ActPlanes(-1, -1, -1, -1, 128)
    assert layout.act_planes("Q32", 64) == layout.ActPlanes(0, 128, 256, 320, 384)
    assert layout.act_planes("Q256", 256) == layout.ActPlanes(0, 512, 1024, 1088, 1152)
    # 32 scales of 4 bytes and 512 sums of 2 bytes
    assert layout.act_planes("Q256", 8192) == layout.ActPlanes(0, 16384, 32768, 32896, 33920)


def test_conversions_match_the_file_format():
    for name, store in layout.FILE_TYPES.items():
        block_cols, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        ours = layout.CONVERSIONS[name]
        assert ours.block_bytes * block_cols == block_bytes * layout.STORE_TYPES[store].block_cols


def test_store_type_of():
    assert {t: layout.store_type_of(t).name for t in layout.FILE_TYPES} == {t: t for t in layout.STORE_TYPES}


def test_raises_on_unsupported_type_and_broken_blocks():
    with pytest.raises(ModelError, match="IQ2_XXS is not supported"):
        layout.store_type_of("IQ2_XXS")
    with pytest.raises(ModelError, match="288 columns, expected a multiple of 256"):
        layout.octet_bytes("Q6_K", 288)
    with pytest.raises(ModelError, match="48 columns"):
        layout.act_planes("Q32", 48)


def test_layout_loads_no_numba():
    code = "import sys, strata_jit.kernels.layout; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
