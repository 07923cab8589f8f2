"""Rotary angles against float64, the rotation against its twin bit for bit."""

import numpy as np
import pytest
from numba import njit

from strata_jit.kernels.ref import rope as ref
from strata_jit.kernels.registry import ROPE_NEOX, ROPE_NORM
from strata_jit.kernels.rope import rotate
from tests.kernels.harness import Step, Team, floats

ANGLE_RTOL = 2.0**-23
ANGLE_ATOL = 1e-15
ROTATIONS = [(128, 128), (64, 64), (32, 32), (128, 32), (64, 20), (80, 80), (64, 0)]


@njit
def _rotate(x, angles, n_rot, mode):
    rotate(x, angles, n_rot, mode)


def frequencies(n_half, base=1e6):
    return base ** (-np.arange(n_half) / n_half)


def rope_angles(team, positions, freqs, factor=1.0):
    angles = floats(len(positions), len(freqs), 2)
    rows = np.zeros((len(positions), 4), np.int64)
    rows[:, 1] = positions
    team.run(
        "rope_angles", Step(len(rows), rows), freqs=freqs, angles=angles, n_half=len(freqs), factor=factor
    )
    return angles


@pytest.mark.parametrize("factor", [1.0, 1.2079441])
def test_rope_angles_match_ref(factor):
    positions = np.array([0, 1, 2, 511, 4095, 131_071, 1_000_003])
    freqs = frequencies(64)
    found = rope_angles(Team((1,)), positions, freqs, factor)
    expected = ref.rope_angles(positions, freqs, np.float32(factor))
    np.testing.assert_allclose(found, expected, rtol=ANGLE_RTOL, atol=ANGLE_ATOL)
    np.testing.assert_array_equal(found[0], np.float32([[factor, 0]] * 64))


def test_rope_angles_one_row_or_many_any_team():
    positions, freqs = np.arange(100, 111), frequencies(16, 1e4)
    alone = rope_angles(Team((1,)), positions, freqs)
    np.testing.assert_array_equal(rope_angles(Team((2, 3)), positions, freqs), alone)
    for i, position in enumerate(positions):
        np.testing.assert_array_equal(rope_angles(Team((1, 1)), [position], freqs)[0], alone[i])


@pytest.mark.parametrize("mode", [ROPE_NEOX, ROPE_NORM])
@pytest.mark.parametrize(("head_dim", "n_rot"), ROTATIONS)
def test_rotate_matches_ref(mode, head_dim, n_rot):
    x = floats(head_dim + 8)
    x[:] = np.random.default_rng(2).standard_normal(len(x))
    angles = ref.rope_angles(np.array([777]), frequencies(max(n_rot // 2, 1), 1e4), 1.0)[0]
    expected = ref.rotate(x[:head_dim], angles, n_rot, mode)
    tail = x[head_dim:].copy()
    _rotate(x.ctypes.data, angles.ctypes.data, n_rot, mode)
    np.testing.assert_array_equal(x[:head_dim], expected)
    np.testing.assert_array_equal(x[head_dim:], tail)


def test_rotate_keeps_lengths():
    """A rotation: the definition's sign and pairing are right, not only the same in both."""
    x = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    angles = ref.rope_angles(np.array([5]), frequencies(32, 1e4), 1.0)[0]
    for mode, pairs in ((ROPE_NEOX, x.reshape(2, 32).T), (ROPE_NORM, x.reshape(32, 2))):
        y = ref.rotate(x, angles, 64, mode)
        turned = (y.reshape(2, 32).T if mode == ROPE_NEOX else y.reshape(32, 2)) @ [1, 1j]
        np.testing.assert_allclose(turned, (pairs @ [1, 1j]) * (angles @ [1, 1j]), rtol=1e-5, atol=1e-6)
