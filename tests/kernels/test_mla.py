"""The ops of latent attention: `mla_prepare`, `head_linear`, `attn_merge_heads`, `attention` if prepared.

Each against its twins, bit for bit, at one row and at many, for teams of any shape.
"""

import numpy as np
import pytest

from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.ref import attention as ref
from strata_jit.kernels.ref.activations import quantize_activation
from strata_jit.kernels.ref.dot import dot
from strata_jit.kernels.ref.norm import rms_norm
from strata_jit.kernels.ref.rope import rope_angles, rotate
from strata_jit.kernels.registry import ROPE_NORM, attention_scratch_bytes
from strata_jit.kernels.scratch import tmp_scratch_bytes
from tests.kernels.harness import Matrix, Step, Team, Vector, aligned, even_slices, floats
from tests.kernels.planes import Planes

N_HEAD, N_NOPE, N_ROT, N_LATENT, N_VALUE = 5, 64, 16, 96, 40
N_KEY = N_LATENT + N_ROT
EPS = 1e-6
N_LAYER, LAYER = 2, 1
SLOT_BYTES = N_LAYER * KV_BLOCK * 2 * (N_KEY + N_LATENT)
LAYER_OFF = LAYER * SLOT_BYTES // N_LAYER
TEAMS = [(1,), (3,), (2, 1), (1, 2, 1)]
UNTOUCHED = 0xA5


def rotated(x, angles):
    """Rows [n, ..., N_ROT] by the angles of each row."""
    return np.stack([rotate(row, angle, N_ROT, ROPE_NORM) for row, angle in zip(x, angles, strict=True)])


class Rows:
    """Random inputs of `mla_prepare` at some positions of sequence 0, and what it must give."""

    def __init__(self, positions, kinds=("Q32",), seed=0):
        rng, n = np.random.default_rng(seed), len(positions)
        self.positions, self.planes = positions, Planes(N_NOPE, kinds)
        self.q, self.kv = floats(n, N_HEAD, N_NOPE + N_ROT), floats(n, N_KEY + 8)
        self.q[:] = rng.standard_normal(self.q.shape)
        self.kv[:, :N_KEY] = rng.standard_normal((n, N_KEY))
        self.norm = rng.uniform(0.5, 2, N_LATENT).astype(np.float32)
        freqs = 1e4 ** (-np.arange(N_ROT // 2) / (N_ROT // 2))
        self.angles = floats(n, N_ROT // 2, 2)
        self.angles[:] = rope_angles(np.asarray(positions), freqs, 1.3)

    def run(self, team, table):
        """(queries, activation planes) that the op writes."""
        n = len(self.positions)
        step = Step(n, [(0, position, 0, 0) for position in self.positions], kv_table=table)
        queries = floats(n, N_HEAD, N_KEY)
        shared = aligned(n * N_HEAD * self.planes.stride, fill=UNTOUCHED).reshape(n * N_HEAD, -1)
        team.run(
            "mla_prepare", step,
            q=self.q, q_stride=self.q.strides[0], n_head=N_HEAD, n_nope=N_NOPE, n_rot=N_ROT,
            queries=queries, queries_stride=queries.strides[0],
            kv=self.kv, kv_stride=self.kv.strides[0], n_latent=N_LATENT, kv_norm=Vector(self.norm), eps=EPS,
            angles=self.angles, layer_off=LAYER_OFF, slot_bytes=SLOT_BYTES, work_scratch=0,
            **self.planes.fields(0, shared),
        )  # fmt: skip
        return queries, shared[:, self.planes.used]

    @property
    def keys(self):
        """float16[n, N_KEY]."""
        latent = rms_norm(self.kv[:, :N_LATENT], self.norm, EPS)
        return np.hstack([latent, rotated(self.kv[:, N_LATENT:N_KEY], self.angles)]).astype(np.float16)


def team_of(threads, n_blocks=2):
    """A team, and the KV table of one sequence whose blocks are dealt to the nodes in turn."""
    team = Team(threads, scratch_bytes=1 << 19, kv_bytes=n_blocks * SLOT_BYTES)
    for kv in team.kv:
        kv[:] = 0xFF
    return team, np.arange(n_blocks)[None] // len(threads)


def cached(team, table, position):
    """(key uint16[N_KEY], value uint16[N_LATENT]) of a position in the cache."""
    block, place = divmod(position, KV_BLOCK)
    slots = team.kv[block % len(team.kv)].view(np.uint16).reshape(-1, N_LAYER, KV_BLOCK * (N_KEY + N_LATENT))
    keys, values = np.split(slots[table[0, block], LAYER], [KV_BLOCK * N_KEY])
    return keys.reshape(-1, N_KEY, 8)[place // 8, :, place % 8], values.reshape(KV_BLOCK, -1)[place]


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("positions", [[0], [255], [256], list(range(250, 262))])
@pytest.mark.parametrize("kinds", [("F32",), ("Q32",), ("F32", "Q32")])
def test_mla_prepare_matches_ref(threads, positions, kinds):
    rows = Rows(positions, kinds)
    team, table = team_of(threads)
    queries, planes = rows.run(team, table)
    np.testing.assert_array_equal(queries[..., N_LATENT:], rotated(rows.q[..., N_NOPE:], rows.angles))
    assert np.isnan(queries[..., :N_LATENT]).all()
    expected = rows.planes.expected(np.ascontiguousarray(rows.q[..., :N_NOPE]).reshape(-1, N_NOPE))
    np.testing.assert_array_equal(planes, expected)
    for position, key in zip(positions, rows.keys.view(np.uint16), strict=True):
        found_key, found_value = cached(team, table, position)
        np.testing.assert_array_equal(found_key, key)
        np.testing.assert_array_equal(found_value, key[:N_LATENT])
    written = sum(int((kv.view(np.uint16) != 0xFFFF).sum()) for kv in team.kv)
    assert written == len(positions) * (N_KEY + N_LATENT)


def q8_0_rows(rng, *shape):
    """uint8[..., row bytes] of random Q8_0 rows of N_NOPE columns."""
    blocks = rng.integers(0, 256, (*shape, N_NOPE // 32, 34), np.uint8)
    blocks[..., :2] = rng.uniform(-0.01, 0.01, blocks.shape[:-1]).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*shape, -1)


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("n_rows", [1, 2, 3, 70])
@pytest.mark.parametrize("type_name", ["Q8_0", "F32"])
def test_head_linear_matches_dot(threads, n_rows, type_name):
    """On every node the rows of its slice; what lies between the heads' outputs is left alone."""
    rng = np.random.default_rng(n_rows)
    kind = {"Q8_0": "Q32", "F32": "F32"}[type_name]
    weights = q8_0_rows(rng, N_HEAD, N_VALUE)
    if type_name == "F32":
        weights = rng.standard_normal((N_HEAD, N_VALUE, N_NOPE)).astype(np.float32).view(np.uint8)
    planes = Planes(N_NOPE, (kind,))
    x = rng.standard_normal((n_rows, N_HEAD, N_NOPE)).astype(np.float32)
    twins = [[quantize_activation(kind, head) for head in row] for row in x]
    acts = aligned(n_rows * N_HEAD * planes.stride).reshape(n_rows, N_HEAD, -1)
    for i, row in enumerate(twins):
        for h, twin in enumerate(row):
            acts[i, h, : len(twin.row())] = twin.row()
    out = floats(n_rows, N_HEAD, N_VALUE + 8)
    team = Team(threads, scratch_bytes=tmp_scratch_bytes())
    team.run(
        "head_linear", Step(n_rows),
        act_shared=acts, act_stride=planes.stride, act_off=0,
        tensor=Matrix(type_name, weights, N_NOPE, even_slices(N_VALUE, len(threads))), n_head=N_HEAD,
        out=out, out_stride=out.strides[0], head_stride=out.strides[1], tmp_scratch=0,
    )  # fmt: skip
    expected = [
        [dot(type_name, weights[h], N_NOPE, twin) for h, twin in enumerate(row)] for row in twins
    ]
    np.testing.assert_array_equal(out[..., :N_VALUE], expected)
    assert np.isnan(out[..., N_VALUE:]).all()


class Sequence:
    """Queries and cached keys of a sequence whose latents have all been written."""

    def __init__(self, threads, n):
        self.n, self.team, self.table = n, *team_of(threads, -(-n // KV_BLOCK))
        rows = Rows(list(range(n)), seed=n)
        rows.run(self.team, self.table)
        self.keys = rows.keys[:, None]
        self.q = np.random.default_rng(1).standard_normal((n, N_HEAD, N_KEY)).astype(np.float32)

    def run(self, positions, planes):
        """uint8[rows * heads, used bytes] by `attention` and `attn_merge_heads`."""
        n, n_blocks = len(positions), self.table.shape[1]
        step = Step(n, [(0, position, 0, 0) for position in positions], kv_table=self.table)
        queries, partial = floats(n, N_HEAD, N_KEY), floats(n, N_HEAD, n_blocks, 8 + N_LATENT)
        queries[:] = self.q[positions]
        before = queries.copy()
        merged = {"partial": partial, "partial_blocks": n_blocks, "window": 0}
        merged |= {"mask": partial, "mask_scratch": 0, "mask_stride": 0, "ratio": 0}
        self.team.run(
            "attention", step,
            qkv=queries, qkv_stride=queries.strides[0], q_off=0, q_stride=queries.strides[1], k_off=0,
            v_off=0, q_norm=0, k_norm=0, eps=EPS, angles=np.zeros(1), n_rot=N_ROT, rope_mode=ROPE_NORM,
            n_head=N_HEAD, n_head_kv=1, head_dim=N_KEY, value_dim=N_LATENT, layer_off=LAYER_OFF,
            slot_bytes=SLOT_BYTES, work_scratch=0, scale=0.1, prepared=1, **merged,
        )  # fmt: skip
        np.testing.assert_array_equal(queries, before)
        shared = aligned(n * N_HEAD * planes.stride, fill=UNTOUCHED).reshape(n * N_HEAD, -1)
        self.team.run(
            "attn_merge_heads", step, n_head=N_HEAD, value_dim=N_LATENT, sinks=0,
            gate=partial, gate_row=0, gate_off=-1, gate_head=0,
            out_scratch=attention_scratch_bytes(N_HEAD, 1, N_KEY), **merged, **planes.fields(0, shared),
        )  # fmt: skip
        return shared[:, planes.used]

    def expected(self, positions):
        """float32[rows * heads, N_LATENT]."""
        keys, values = self.keys, self.keys[..., :N_LATENT]
        rows = [ref.attend(self.q[p], keys[: p + 1], values[: p + 1], 0.1) for p in positions]
        return np.concatenate(rows)


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("n", [20, 256, 300])
@pytest.mark.parametrize("kinds", [("F32",), ("Q32",)])
def test_attention_of_prepared_rows_by_heads(threads, n, kinds):
    sequence, planes = Sequence(threads, n), Planes(N_LATENT, kinds)
    for positions in ([n - 1], [n - 3, n - 2, n - 1]):
        found = sequence.run(positions, planes)
        np.testing.assert_array_equal(found, planes.expected(sequence.expected(positions)))


def test_absorbed_form_is_multi_head_attention():
    """Queries through k_b against latents, and v_b after the sum: heads with keys and values of their own."""
    rng, n = np.random.default_rng(2), 30
    latents, q = rng.standard_normal((n, N_LATENT)), rng.standard_normal((N_HEAD, N_NOPE))
    k_b = rng.standard_normal((N_HEAD, N_LATENT, N_NOPE))
    v_b = rng.standard_normal((N_HEAD, N_VALUE, N_LATENT))
    absorbed = np.einsum("hlk,hk->hl", k_b, q).astype(np.float32)
    cache = latents.astype(np.float16)[:, None]
    sums = ref.attend(absorbed, cache, cache, 0.01)
    keys = np.einsum("hlk,pl->phk", k_b, cache[:, 0].astype(np.float64))
    scores = np.einsum("hk,phk->hp", q, keys) * 0.01
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    values = np.einsum("hvl,pl->phv", v_b, cache[:, 0].astype(np.float64))
    expected = np.einsum("hp,phv->hv", p / p.sum(axis=1, keepdims=True), values)
    np.testing.assert_allclose(np.einsum("hvl,hl->hv", v_b, sums), expected, rtol=1e-4, atol=1e-4)
