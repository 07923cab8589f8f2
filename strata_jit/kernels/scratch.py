"""How the matrix ops cut their work, and the thread scratch that they need for it.

Owns the constants behind runs of octets and blocks of rows, and the formulas by which a program builder sizes
`tmp_scratch`, `list_scratch` and `route_scratch`. Imports no Numba, so that the host process can share it.
None of the constants changes a result: every output element is one whole dot product.
"""

from strata_jit.kernels.layout import ALIGN, round_up

RUN_BYTES = 128 * 1024
"""Weights that one claim takes at most: long enough for a stream, short enough for an even finish."""
UNITS_PER_THREAD = 6
"""Claims that every thread should get, where the octets suffice."""
RUN_OCTETS_ONE = 16
"""Longest run of a one-row step; bounds its tile."""
RUN_OCTETS_MANY = 8
"""Longest run of a many-row step; bounds its tile."""
ROW_BLOCK = 64
"""Rows given to a many-token kernel at a time: activations and results stay in the second-level cache."""

MANY_MIN = 3
"""From this many rows on, the many-token kernels win: they unpack the weights first."""

OCTET_BYTES = 32
"""One octet's results for one row: eight float32."""
DOT_SCRATCH_BYTES = 24 * 1024 + 128 * ROW_BLOCK
"""At least `dot.many_scratch_bytes(ROW_BLOCK)`."""
TILE_ROW_BYTES = 2 * RUN_OCTETS_MANY * OCTET_BYTES
"""Results of one row and one run; twice, since gate and up runs share a tile."""

# --- parts of tmp_scratch, in order ------------------------------------------------------------------------
# In one-row forms the tile starts at offset 0 instead, and is at most `ONE_TILE_BYTES`.
TMP_ACTS = 0
"""int64[ROW_BLOCK]: addresses of activation rows."""
TMP_OUTS = TMP_ACTS + 8 * ROW_BLOCK
"""int64[ROW_BLOCK]: addresses of result rows."""
TMP_DOT = TMP_OUTS + 8 * ROW_BLOCK
"""The many-token kernel's own scratch."""
TMP_TILE = TMP_DOT + DOT_SCRATCH_BYTES
"""float32[ROW_BLOCK][TILE_ROW_BYTES / 4]."""
ONE_TILE_BYTES = 2 * RUN_OCTETS_ONE * OCTET_BYTES


def tmp_scratch_bytes() -> int:
    """Bytes of `tmp_scratch` of linear, moe_gate_up and moe_down; the same for every number of rows."""
    return max(TMP_TILE + ROW_BLOCK * TILE_ROW_BYTES, ONE_TILE_BYTES)


def list_scratch_bytes(n_rows: int, n_used: int, n_expert: int) -> int:
    """Bytes of `list_scratch` of moe_gate_up and moe_down for steps of at most `n_rows` rows."""
    return round_up(8 * (2 * n_expert + 2 + n_rows * n_used), ALIGN)


def route_scratch_bytes(n_expert: int, n_used: int) -> int:
    """Bytes of `route_scratch`: ids, weights, probabilities of one row, keys of experts and of groups."""
    n_octets = (n_expert + 7) // 8
    return probabilities_offset(n_used) + round_up(4 * (8 + 9 + 9) * n_octets, ALIGN)


def probabilities_offset(n_used: int) -> int:
    """Byte offset in `route_scratch` of the probabilities, behind int64 ids and float32 weights [n_used]."""
    return round_up(12 * n_used, ALIGN)
