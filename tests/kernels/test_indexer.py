"""The indexer's ops against their twins, bit for bit, over steps, teams and nodes."""

import numpy as np
import pytest

from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.index_select import select_best
from strata_jit.kernels.ref import indexer as ref
from strata_jit.kernels.ref.norm import rms_norm
from strata_jit.kernels.ref.rope import rope_angles, rotate
from strata_jit.kernels.registry import ROPE_NEOX, index_block_bytes, index_scratch_bytes
from tests.kernels.harness import Step, Team, Vector, aligned, floats

EPS = 1e-6
N_HEAD, HEAD_DIM, N_ROT = 5, 16, 12
WIDTH = (N_HEAD + 1) * HEAD_DIM
N_BLOCKS, LAYER_OFF = 3, 256
FREQS = 1e4 ** (-np.arange(N_ROT // 2) / (N_ROT // 2))
FACTOR = 1.25
WORK = 64
UNWRITTEN = 0x5A5A5A5A5A5A5A5A


class Sequence:
    def __init__(self, n, ratio, seed=0):
        rng = np.random.default_rng(seed)
        self.n, self.ratio = n, ratio
        self.qk = rng.standard_normal((n, WIDTH)).astype(np.float32)
        self.q_norm, self.k_norm = rng.uniform(0.5, 2, (2, HEAD_DIM)).astype(np.float32)
        self.angles = rope_angles(np.arange(n), FREQS, FACTOR)
        raw = self.qk[:, N_HEAD * HEAD_DIM :].astype(np.float16)
        self.keys = ref.block_keys(raw, ratio, self.k_norm, self.angles, N_ROT, EPS)

    def scores(self, position):
        q = rms_norm(self.qk[position, : N_HEAD * HEAD_DIM].reshape(N_HEAD, -1), self.q_norm, EPS)
        q = rotate(q, self.angles[position], N_ROT, ROPE_NEOX)
        return ref.scores(q, self.keys[: (position + 1) // self.ratio])

    def selected(self, position, n_best):
        """bool[position + 1]: positions that are attended to."""
        chosen = np.repeat(ref.select(self.scores(position), n_best), self.ratio)
        return np.concatenate([chosen, np.ones(position + 1 - len(chosen), bool)])


class Runner:
    def __init__(self, sequence, threads, n_best):
        self.s, self.n_best = sequence, n_best
        self.slot_bytes = LAYER_OFF + index_block_bytes(HEAD_DIM, sequence.ratio)
        self.work = index_scratch_bytes(N_HEAD, HEAD_DIM, N_ROT)
        self.mask_scratch = (WORK + self.work + 63) // 64 * 64
        self.team = Team(threads, self.mask_scratch + 8 * N_BLOCKS, kv_bytes=N_BLOCKS * self.slot_bytes)
        for kv in self.team.kv:
            kv[:] = 0xFF
        self.table = np.arange(N_BLOCKS)[None, ::-1] // len(threads)

    def step(self, positions):
        """(scores float32[n, blocks], masks int64[n, N_BLOCKS])"""
        n, s = len(positions), self.s
        step = Step(n, [(0, p, 0, 0) for p in positions], kv_table=self.table)
        qk, angles = floats(n, WIDTH), floats(n, N_ROT // 2, 2)
        qk[:], angles[:] = s.qk[positions], s.angles[positions]
        freqs = aligned(8 * len(FREQS)).view(np.float64)
        freqs[:] = FREQS
        scores = floats(n, N_BLOCKS * KV_BLOCK // s.ratio)
        common = {
            "index_qk": qk, "index_stride": qk.strides[0], "index_q_off": 0,
            "index_k_off": 4 * N_HEAD * HEAD_DIM, "q_norm": Vector(s.q_norm), "k_norm": Vector(s.k_norm),
            "eps": EPS, "angles": angles, "freqs": freqs,
            "angle_factor": FACTOR, "n_rot": N_ROT, "n_head": N_HEAD,
            "head_dim": HEAD_DIM, "ratio": s.ratio, "n_best": self.n_best, "layer_off": LAYER_OFF,
            "slot_bytes": self.slot_bytes, "work_scratch": WORK,
        }  # fmt: skip
        self.team.run("index_prepare", step, **common)
        scored = {"scores": scores, "scores_stride": scores.strides[0]}
        self.team.run("index_score", step, **common, **scored)
        masks = aligned(8 * n * N_BLOCKS).view(np.int64).reshape(n, N_BLOCKS)
        masks[:] = UNWRITTEN
        self.team.run(
            "index_select", step, ratio=s.ratio, n_best=self.n_best,
            mask_scratch=self.mask_scratch, mask=masks, mask_stride=masks.strides[0], **scored,
        )  # fmt: skip
        if n == 1:
            copies = [c[self.mask_scratch :][: 8 * N_BLOCKS].view(np.int64) for c in self.team.scratch]
            for copy in copies:
                np.testing.assert_array_equal(copy[: positions[0] // KV_BLOCK + 1],
                                              copies[0][: positions[0] // KV_BLOCK + 1])  # fmt: skip
            masks = copies[0][None].copy()
        return scores, masks

    def check(self, positions):
        scores, masks = self.step(positions)
        for p, score, mask in zip(positions, scores, masks, strict=True):
            if (p + 1) // self.s.ratio > self.n_best:
                expected = self.s.scores(p)
                np.testing.assert_array_equal(score[: len(expected)], expected)
            np.testing.assert_array_equal(positions_of(mask, self.s.ratio)[: p + 1],
                                          self.s.selected(p, self.n_best))  # fmt: skip


def positions_of(mask, ratio):
    bits = mask.view(np.uint64)[:, None] >> np.arange(KV_BLOCK // ratio, dtype=np.uint64) & np.uint64(1)
    return np.repeat(bits.ravel() != 0, ratio)


@pytest.mark.parametrize("threads", [(1,), (3,), (2, 1)])
@pytest.mark.parametrize(("ratio", "n_best"), [(4, 20), (8, 3), (16, 2), (32, 1)])
def test_steps_of_any_size_give_the_twins_bits(threads, ratio, n_best):
    s = Sequence(530, ratio)
    runner, first = Runner(s, threads, n_best), 0
    for size in [1, 1, 2, 1, 7, 60, *[1] * 9, 300, 3, 100, *[1] * 46]:
        runner.check(list(range(first, first + size)))
        first += size
    assert first == s.n


def test_few_blocks_are_all_taken():
    """Nothing is scored then: the scores stay untouched."""
    runner = Runner(Sequence(40, 4), (2,), 10)
    scores, masks = runner.step(list(range(40)))
    assert np.isnan(scores).all()
    assert (masks[:, 0] == -1).all()


@pytest.mark.parametrize("n_best", [1, 5, 63, 64, 65, 199])
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "extremes", "equal"])
def test_selection(n_best, kind):
    rng = np.random.default_rng(n_best)
    n, score = 200, floats(200)
    score[:] = {
        "random": rng.uniform(0, 5, n), "ties": rng.integers(0, 4, n), "zeros": np.zeros(n),
        "extremes": rng.choice([0, 1e-45, 1e-38, 3e38, np.inf], n), "equal": np.full(n, 2.5),
    }[kind]  # fmt: skip
    mask = aligned(8 * 4).view(np.int64)
    select_best(score.ctypes.data, n, n_best, 64, mask.ctypes.data)
    np.testing.assert_array_equal(positions_of(mask, 4)[::4][:n], ref.select(score, n_best))
    assert not positions_of(mask, 4)[::4][n:].any()
