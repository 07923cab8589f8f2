"""The VNNI variants: their arithmetic by emulation on any CPU, their instructions by compiling for others.

The emulation is the code of the real variant but for one instruction, which AVX2 code stands in for.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import strata_jit
from strata_jit.kernels import isa, layout
from strata_jit.kernels.dot import dot_one_kernel
from strata_jit.kernels.isa.portable import V16I16
from strata_jit.kernels.isa.vnni import Avx512Vnni
from strata_jit.kernels.vec import const
from strata_jit.kernels.weights import FORMATS
from tests.kernels.test_dot import activation, check, random_rows, run_one, stored

EMULATED = f"vnni-emulated-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
"""Named by this file's content: the kernels' cache knows no other source of theirs."""
COMPILE_S = 600
CPUS = {
    "avx512vnni": ("icelake-server", "+avx512f,+avx512vl,+avx512vnni,+avx512bw,+avx512dq"),
    "avxvnni": ("alderlake", "+avxvnni"),
}
COMPILED = ("IQ4_XS", "IQ4_NL", "Q8_0")


class Emulated(Avx512Vnni):
    """Products of int16 in place of vpdpbusd."""

    name = EMULATED
    needs = Avx512Vnni.needs - {"avx512vnni", "avx512vl"}

    def dot4(self, b, total, w, a):
        w, a, eight = b.bitcast(w, V16I16), b.bitcast(a, V16I16), const(V16I16, 8)
        even = self.madd(b, b.and_(w, const(V16I16, 255)), b.ashr(b.shl(a, eight), eight))
        odd = self.madd(b, b.lshr(w, eight), b.ashr(a, eight))
        return b.add(total, b.add(even, odd))


@pytest.fixture(autouse=True, scope="module")
def emulated():
    """Make the emulation known by its name, to these tests alone."""
    if not Emulated.needs <= isa.host_features():
        pytest.skip("the emulation keeps AVX2's instructions, which this CPU lacks")
    isa.ISAS[EMULATED] = Emulated()
    yield
    del isa.ISAS[EMULATED]


@pytest.mark.parametrize("name", FORMATS)
def test_dot_matches_twin(name):
    rng = np.random.default_rng(7)
    for n_rows, n_blocks, n_tok in ((1, 1, 3), (21, 3, 6)):
        n_cols = max(32, layout.STORE_TYPES[name].block_cols) * n_blocks
        xs = rng.standard_normal((n_tok, n_cols)).astype(np.float32)
        check(name, EMULATED, random_rows(rng, name, n_rows, n_cols), n_cols, xs)


@pytest.mark.parametrize("name", FORMATS)
def test_dot_matches_twin_at_the_ends_of_the_range(name):
    for fill in (0x00, 0x0F, 0x77, 0x7F, 0x80, 0xF0, 0xFF):
        rng = np.random.default_rng(fill)
        n_cols = 2 * layout.STORE_TYPES[name].block_cols
        x = np.where(rng.integers(0, 2, (3, n_cols)) > 0, 127.0, -127.0).astype(np.float32)
        x[1], x[2] = 127, -127
        check(name, EMULATED, random_rows(rng, name, 9, n_cols, fill), n_cols, x)


@pytest.mark.parametrize("name", ["IQ4_XS", "IQ4_NL", "Q8_0"])
def test_what_is_added_to_weights_is_taken_off_exactly(name):
    """The largest sums of a, the ends of weights and scales: nothing of 128 * sum(a) is left."""
    kind = layout.STORE_TYPES[name].act_kind
    n_cols = {"Q256": 256, "Q32": 32}[kind]
    rows = np.zeros((8, layout.CONVERSIONS[name].block_bytes), np.uint8)
    rows[:, 1] = 0x3C  # d = 1
    codes = {"IQ4_XS": slice(8, None), "IQ4_NL": slice(2, None), "Q8_0": slice(2, None)}[name]
    rows[:4, codes], rows[4:, codes] = (0x80, 0x7F) if name == "Q8_0" else (0x00, 0xFF)
    if name == "IQ4_XS":
        rows[::2, 2:8] = 0xFF  # scales of 31, else -32
    least, largest = (-128, 127) if name == "Q8_0" else (-127, 113)
    octets, stride, n_octets = stored(rows, name, n_cols)
    for x in (127.0, -127.0):
        _, memory = activation(name, np.full(n_cols, x, np.float32))
        got = run_one(name, EMULATED, octets, stride, n_octets, n_cols, memory)
        weights = np.repeat([least, largest], 4) * (np.resize([31, -32], 8) if name == "IQ4_XS" else 1)
        np.testing.assert_array_equal(got, (weights * n_cols * x).astype(np.float32))


def test_kernels_differ_from_avx2s(monkeypatch, tmp_path):
    """Else the emulation would test nothing. A kernel from the cache would have no assembly."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    asm = [dot_one_kernel("IQ4_NL", name)._library.get_asm_str() for name in (EMULATED, "avx2")]
    assert "vpsignb" not in asm[0] and "vpsignb" in asm[1]


def test_order_of_preference(monkeypatch):
    avx2 = isa.ISAS["avx2"].needs
    for features, expected in (
        ({"avx512vnni", "avx512vl", "avxvnni"}, "avx512vnni"),
        ({"avx512vnni", "avxvnni"}, "avxvnni"),
        ({"avx512vnni"}, "avx2"),
        (set(), "avx2"),
    ):
        monkeypatch.setattr(isa, "host_features", lambda found=features: frozenset(avx2 | found))
        assert isa.choose("auto") == expected


@pytest.mark.parametrize(
    ("name", "missing"), [("avx512vnni", "avx512vl, avx512vnni"), ("avxvnni", "avxvnni")]
)
def test_cpu_without_it_is_refused_by_name(monkeypatch, name, missing):
    monkeypatch.setattr(isa, "host_features", lambda: isa.ISAS["avx2"].needs)
    with pytest.raises(ValueError, match=f"this CPU lacks {missing} for --isa {name}; use --isa auto"):
        isa.choose(name)


# --- instructions ------------------------------------------------------------------------------------------

COMPILE = """
import json, sys
from strata_jit.kernels.dot import dot_many_kernel, dot_one_kernel
names, target = sys.argv[1].split(","), sys.argv[2]
print(json.dumps({
    name: [make(name, target)._library.get_asm_str() for make in (dot_one_kernel, dot_many_kernel)]
    for name in names
}))
"""


@pytest.fixture(scope="module", params=CPUS)
def compiled(request, tmp_path_factory):
    """(instruction set, {type: (assembly of its one-token kernel, of its many-token kernel)})."""
    cpu, features = CPUS[request.param]
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": f"+avx2,+fma,+f16c,{features}",
        "NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(Path(strata_jit.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, ",".join(COMPILED), request.param],
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def inner_loop(asm, n_dots=1):
    """The lines of the shortest loop (label to the jump back to it) of so many vpdpbusd or more."""
    lines, labels, loops = asm.splitlines(), {}, []
    for at, line in enumerate(lines):
        if match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = at
        elif (match := re.match(r"\s+j\w+\s+(\.L\w+)", line)) and match[1] in labels:
            loops.append(lines[labels[match[1]] : at + 1])
    return min((loop for loop in loops if "".join(loop).count("vpdpbusd") >= n_dots), key=len)


@pytest.mark.parametrize("name", COMPILED)
def test_instructions_of_the_one_token_kernel(compiled, name):
    target, kernels = compiled
    loop = inner_loop(kernels[name][0])
    check_dots(loop, target, 8 * FORMATS[name].sub_blocks_per_scales)
    assert [line for line in loop if on_stack(line)] == []


@pytest.mark.parametrize("name", COMPILED)
def test_instructions_of_the_many_token_kernel(compiled, name):
    """The tile of four tokens and two octets: in 16 registers its totals find no room beside its sums."""
    target, kernels = compiled
    n_dots = 64 * min(FORMATS[name].n_sub, 2)
    loop = inner_loop(kernels[name][1], n_dots)
    check_dots(loop, target, n_dots)
    spilled = [line for line in loop if on_stack(line)]
    assert len(spilled) <= (4 if target == "avx512vnni" else n_dots // 2)


def check_dots(loop, target, n_dots):
    dots = [line for line in loop if "vpdpbusd" in line]
    assert len(dots) == n_dots
    assert all(("{vex}" in line) == (target == "avxvnni") for line in dots)
    assert not any("zmm" in line for line in loop)
    assert not any("vpsignb" in line or "vpmaddubsw" in line for line in loop)


def on_stack(line):
    """Whether a vector goes to or comes from the stack."""
    return "(%rsp)" in line and ("ymm" in line or "xmm" in line)
