"""The ops `moe_down` and `moe_combine`: from the experts' inner values to their weighted sum.

For each entry (row, rank) d = down . ff + bias. For each row, and the shared expert first if there is one:
x = x + (shared . ff) * scale; y = 0, then y = fma(weight, d, y) for its ranks ascending; x = x + y * scale.
Without `add` the first of these lines sets x. An entry whose id names no expert contributes nothing.
One row: the threads share runs of octets and do all of this; many rows: `moe_down` has the entries' d
(`expert_runs`), `linear_rows` the shared expert, `moe_combine` the sum. Owns no arithmetic but these lines.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.abi import ROW_GROUP
from strata_jit.kernels.expert_runs import share_experts
from strata_jit.kernels.grouping import is_expert
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.runs import (
    add_bias,
    bias_address,
    column_bytes,
    dot_run,
    dots,
    list_row,
    n_runs,
    octet_address,
    one_row_run,
    put_octet,
    rows_from,
    store_octet,
)
from strata_jit.kernels.scratch import OCTET_BYTES, RUN_OCTETS_ONE, TILE_ROW_BYTES, TMP_TILE
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import float_word, fma8, load8, load_f32, load_i64, splat8, store8, word

DOWN = arg_index("moe_down")
COMBINE = arg_index("moe_combine")


@op
def moe_down_one(control, args, thread):
    """Claim runs of octets, each summed over the shared expert and the ranks by one thread."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    down, n_used = word(args, DOWN.down), word(args, DOWN.n_used)
    n_octets, stride = word(down, abi.TENSOR_N_OCTETS), word(down, abi.TENSOR_OCTET_STRIDE)
    run = one_row_run(control, thread, n_octets * stride, stride, RUN_OCTETS_ONE)
    unit = first_unit(thread)
    while unit < n_runs(n_octets, run):
        octet = unit * run
        n = min(run, n_octets - octet)
        y, x = scratch + word(args, DOWN.tmp_scratch), word(args, DOWN.x) + column_bytes(down, octet)
        add, shared = word(args, DOWN.add), word(args, DOWN.shared)
        if shared != 0:
            dot_run(shared, 0, octet, n, scratch + word(args, DOWN.shared_act), y)
            put_run(args, octet, n, y, x, add)
            add = 1
        sum_ranks(args, scratch, octet, n, n_used, y)
        put_run(args, octet, n, y, x, add)
        unit = claim(thread)


@inline_kernel
def put_run(args, octet, n, y, x, add):
    """x = [x +] y * scale of one run."""
    scale, down = splat8(float_word(args, DOWN.scale)), word(args, DOWN.down)
    for i in range(n):
        value = load8(y + OCTET_BYTES * i) * scale
        put_octet(x + OCTET_BYTES * i, value, add, rows_from(down, octet + i))


@inline_kernel
def sum_ranks(args, scratch, octet, n, n_used, y):
    """y float32[8n] = sum of weight * d over the ranks of the row; scratch for another 8n follows it."""
    down, dot = word(args, DOWN.down), y + OCTET_BYTES * n
    ids = scratch + word(args, DOWN.route_scratch)
    act = scratch + word(args, DOWN.act_scratch) + word(args, DOWN.down_off)
    for i in range(n):
        store8(y + OCTET_BYTES * i, splat8(0.0))
    for rank in range(n_used):
        expert = word(ids, rank)
        if is_expert(expert, word(args, DOWN.n_expert)):
            dot_run(down, expert, octet, n, act + rank * word(args, DOWN.act_stride), dot)
            bias = bias_address(word(args, DOWN.down_bias), expert, down, octet)
            weight = splat8(load_f32(ids + 8 * n_used + 4 * rank))
            for i in range(n):
                d, to = add_bias(load8(dot + OCTET_BYTES * i), bias, i), y + OCTET_BYTES * i
                store8(to, fma8(weight, d, load8(to)))


@op
def moe_down_many(control, args, thread):
    """Claim (expert, run) for all entries of the step; results stay apart, for `moe_combine`."""
    down, n_entries = word(args, DOWN.down), word(control, abi.STEP_N_ROWS) * word(args, DOWN.n_used)
    share_experts(
        down_run_many,
        args,
        thread,
        word(args, DOWN.ids),
        n_entries,
        word(args, DOWN.n_expert),
        word(thread, abi.THREAD_SCRATCH) + word(args, DOWN.list_scratch),
        word(down, abi.TENSOR_N_OCTETS),
        word(down, abi.TENSOR_OCTET_STRIDE),
    )


@inline_kernel
def down_run_many(args, scratch, expert, octet, n, entries, n_tok):
    """One run of down for n_tok entries of an expert, straight to their rows of d if they can be."""
    down, tmp = word(args, DOWN.down), scratch + word(args, DOWN.tmp_scratch)
    act, act_stride = word(args, DOWN.act_shared) + word(args, DOWN.down_off), word(args, DOWN.act_stride)
    d, d_stride = word(args, DOWN.d) + column_bytes(down, octet), word(args, DOWN.d_stride)
    bias, tile = bias_address(word(args, DOWN.down_bias), expert, down, octet), tmp + TMP_TILE
    plain = bias == 0 and rows_from(down, octet) >= ROW_GROUP * n
    for t in range(n_tok):
        entry = word(entries, t)
        out = d + entry * d_stride if plain else tile + t * TILE_ROW_BYTES
        list_row(tmp, t, act + entry * act_stride, out)
    dots(down, octet_address(down, expert, octet), word(down, abi.TENSOR_OCTET_STRIDE), n, n_tok, tmp)
    if not plain:
        for t in range(n_tok):
            for i in range(n):
                y = add_bias(load8(tile + t * TILE_ROW_BYTES + OCTET_BYTES * i), bias, i)
                to = d + word(entries, t) * d_stride + OCTET_BYTES * i
                store_octet(to, y, rows_from(down, octet + i))


@op
def moe_combine(control, args, thread):
    """Weighted sum of d over the ranks: the team shares the octets of all rows evenly."""
    n_rows, n_embd = word(control, abi.STEP_N_ROWS), word(args, COMBINE.n_embd)
    row_octets = (n_embd + 7) // 8
    total, team_size = n_rows * row_octets, word(thread, abi.THREAD_TEAM_SIZE)
    member = word(thread, abi.THREAD_TEAM_INDEX)
    for i in range(total * member // team_size, total * (member + 1) // team_size):
        row, octet = i // row_octets, i % row_octets
        y = combine_octet(args, row, octet) * splat8(float_word(args, COMBINE.scale))
        x = word(args, COMBINE.x) + row * word(args, COMBINE.x_stride) + OCTET_BYTES * octet
        put_octet(x, y, word(args, COMBINE.add), n_embd - ROW_GROUP * octet)


@inline_kernel
def combine_octet(args, row, octet):
    """Weighted sum over the ranks of one octet of a row, in the order of `sum_ranks`."""
    n_used, d_stride = word(args, COMBINE.n_used), word(args, COMBINE.d_stride)
    y = splat8(0.0)
    for entry in range(row * n_used, (row + 1) * n_used):
        if load_i64(word(args, COMBINE.ids) + 8 * entry) >= 0:
            weight = splat8(load_f32(word(args, COMBINE.weights) + 4 * entry))
            y = fma8(weight, load8(word(args, COMBINE.d) + entry * d_stride + OCTET_BYTES * octet), y)
    return y
