"""The ops of a block of experts: `moe_gate_up`, `moe_down`, `moe_combine`.

For each entry (row, rank) ff = silu(gate . x) * (up . x); for each row y = 0, then y = fma(w, down . ff, y)
for its ranks ascending, then x = x + y. An entry whose id names no expert contributes nothing.
One-row ops share out runs of octets over the ranks; many-row ops read an expert's weights once for all its
entries (`grouping`). Owns no arithmetic but the lines above.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.abi import ROW_GROUP
from strata_jit.kernels.grouping import active_expert, entries_of, group_entries, is_expert, n_entries_of
from strata_jit.kernels.mathx import silu8
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.runs import (
    add_octet,
    column_bytes,
    dot_run,
    dots,
    list_row,
    n_runs,
    octet_address,
    one_row_run,
    rows_from,
    run_octets,
    store_octet,
)
from strata_jit.kernels.scratch import (
    OCTET_BYTES,
    ROW_BLOCK,
    RUN_OCTETS_MANY,
    RUN_OCTETS_ONE,
    TILE_ROW_BYTES,
    TMP_TILE,
)
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import call6, fma8, load8, load_f32, load_i64, splat8, store8, word

GATE_UP = arg_index("moe_gate_up")
DOWN = arg_index("moe_down")
COMBINE = arg_index("moe_combine")


# --- gate and up ------------------------------------------------------------------------------------------
# Where gate and up octets alternate, a run is one stream of 2n octets of one type, and one call does both.


@inline_kernel
def is_paired(gate, up):
    """Whether the octets of up lie between those of gate."""
    half = word(gate, abi.TENSOR_OCTET_STRIDE) // 2
    return word(up, abi.TENSOR_ADDR) == word(gate, abi.TENSOR_ADDR) + half


@inline_kernel
def gate_up_bytes(gate, up):
    """Bytes of one octet of gate and one of up."""
    if is_paired(gate, up):
        return word(gate, abi.TENSOR_OCTET_STRIDE)
    return word(gate, abi.TENSOR_OCTET_STRIDE) + word(up, abi.TENSOR_OCTET_STRIDE)


@inline_kernel
def combine_run(gate, up, octet, n, tile, ff):
    """ff = silu(gate) * up of one run and row. In a paired tile octets of gate and up alternate."""
    paired = is_paired(gate, up)
    step = 2 * OCTET_BYTES if paired else OCTET_BYTES
    up_tile = tile + OCTET_BYTES if paired else tile + TILE_ROW_BYTES // 2
    for i in range(n):
        y = silu8(load8(tile + step * i)) * load8(up_tile + step * i)
        store_octet(ff + OCTET_BYTES * i, y, rows_from(gate, octet + i))


@op
def moe_gate_up_one(control, args, thread):
    """Claim (rank, run) of the row's experts."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    gate, up = word(args, GATE_UP.gate), word(args, GATE_UP.up)
    n_used, n_octets = word(args, GATE_UP.n_used), word(gate, abi.TENSOR_N_OCTETS)
    step_bytes = gate_up_bytes(gate, up)
    work = n_used * n_octets * step_bytes
    run = one_row_run(control, thread, work, step_bytes, RUN_OCTETS_MANY)
    runs = n_runs(n_octets, run)
    act, tile = scratch + word(args, GATE_UP.act_scratch), scratch + word(args, GATE_UP.tmp_scratch)
    unit = first_unit(thread)
    while unit < n_used * runs:
        rank, octet = unit // runs, unit % runs * run
        expert = word(scratch + word(args, GATE_UP.route_scratch), rank)
        if is_expert(expert, word(args, GATE_UP.n_expert)):
            n = min(run, n_octets - octet)
            gate_up_run_one(args, expert, octet, n, act, tile)
            ff = word(args, GATE_UP.ff) + rank * word(args, GATE_UP.ff_stride) + column_bytes(gate, octet)
            combine_run(gate, up, octet, n, tile, ff)
        unit = claim(thread)


@inline_kernel
def gate_up_run_one(args, expert, octet, n, act, tile):
    """Dot products of one run of gate and up with one row."""
    gate, up = word(args, GATE_UP.gate), word(args, GATE_UP.up)
    gate_act, up_act = act + word(args, GATE_UP.gate_off), act + word(args, GATE_UP.up_off)
    if is_paired(gate, up):
        w, stride = octet_address(gate, expert, octet), word(gate, abi.TENSOR_OCTET_STRIDE) // 2
        call6(word(gate, abi.TENSOR_DOT_ONE), w, stride, 2 * n, word(gate, abi.TENSOR_N_COLS), gate_act, tile)
    else:
        dot_run(gate, expert, octet, n, gate_act, tile)
        dot_run(up, expert, octet, n, up_act, tile + TILE_ROW_BYTES // 2)


@op
def moe_gate_up_many(control, args, thread):
    """Claim (expert, run) for all rows of the step."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    gate, up = word(args, GATE_UP.gate), word(args, GATE_UP.up)
    n_expert, lists = word(args, GATE_UP.n_expert), scratch + word(args, GATE_UP.list_scratch)
    n_entries = word(control, abi.STEP_N_ROWS) * word(args, GATE_UP.n_used)
    n_active = group_entries(word(args, GATE_UP.ids), n_entries, n_expert, lists)
    n_octets, step_bytes = word(gate, abi.TENSOR_N_OCTETS), gate_up_bytes(gate, up)
    work = n_active * n_octets * step_bytes
    run = run_octets(work, step_bytes, word(thread, abi.THREAD_N_THREADS), RUN_OCTETS_MANY)
    runs = n_runs(n_octets, run)
    unit = first_unit(thread)
    while unit < n_active * runs:
        expert, octet = active_expert(lists, n_expert, unit // runs), unit % runs * run
        entries, count = entries_of(lists, n_expert, expert), n_entries_of(lists, expert)
        for first in range(0, count, ROW_BLOCK):
            n_tok, at = min(count - first, ROW_BLOCK), entries + 8 * first
            gate_up_run_many(args, scratch, expert, octet, min(run, n_octets - octet), at, n_tok)
        unit = claim(thread)


@inline_kernel
def gate_up_run_many(args, scratch, expert, octet, n, entries, n_tok):
    """One run of gate and up for n_tok entries of an expert."""
    gate, up = word(args, GATE_UP.gate), word(args, GATE_UP.up)
    tmp = scratch + word(args, GATE_UP.tmp_scratch)
    tile = tmp + TMP_TILE
    stride = word(gate, abi.TENSOR_OCTET_STRIDE)
    list_gate_up(args, entries, n_tok, tmp, word(args, GATE_UP.gate_off), tile)
    if is_paired(gate, up):
        dots(gate, octet_address(gate, expert, octet), stride // 2, 2 * n, n_tok, tmp)
    else:
        dots(gate, octet_address(gate, expert, octet), stride, n, n_tok, tmp)
        list_gate_up(args, entries, n_tok, tmp, word(args, GATE_UP.up_off), tile + TILE_ROW_BYTES // 2)
        dots(up, octet_address(up, expert, octet), word(up, abi.TENSOR_OCTET_STRIDE), n, n_tok, tmp)
    ff = word(args, GATE_UP.ff) + column_bytes(gate, octet)
    for t in range(n_tok):
        to = ff + word(entries, t) * word(args, GATE_UP.ff_stride)
        combine_run(gate, up, octet, n, tile + t * TILE_ROW_BYTES, to)


@inline_kernel
def list_gate_up(args, entries, n_tok, tmp, act_off, tile):
    """List the activation rows of the entries, and a row of the tile for each."""
    act, stride = word(args, GATE_UP.act_shared) + act_off, word(args, GATE_UP.act_stride)
    n_used = word(args, GATE_UP.n_used)
    for t in range(n_tok):
        list_row(tmp, t, act + word(entries, t) // n_used * stride, tile + t * TILE_ROW_BYTES)


# --- down -------------------------------------------------------------------------------------------------


@op
def moe_down_one(control, args, thread):
    """Claim runs of octets, each summed over the ranks by one thread."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    down, n_used = word(args, DOWN.down), word(args, DOWN.n_used)
    n_octets, stride = word(down, abi.TENSOR_N_OCTETS), word(down, abi.TENSOR_OCTET_STRIDE)
    run = one_row_run(control, thread, n_octets * stride, stride, RUN_OCTETS_ONE)
    unit = first_unit(thread)
    while unit < n_runs(n_octets, run):
        octet = unit * run
        n = min(run, n_octets - octet)
        y = scratch + word(args, DOWN.tmp_scratch)
        sum_ranks(args, scratch, octet, n, n_used, y)
        x = word(args, DOWN.x) + column_bytes(down, octet)
        for i in range(n):
            add_octet(x + OCTET_BYTES * i, load8(y + OCTET_BYTES * i), rows_from(down, octet + i))
        unit = claim(thread)


@inline_kernel
def sum_ranks(args, scratch, octet, n, n_used, y):
    """y float32[8n] = sum of weight * down over the ranks of the row; scratch for another 8n follows it."""
    dot = y + OCTET_BYTES * n
    ids = scratch + word(args, DOWN.route_scratch)
    act = scratch + word(args, DOWN.act_scratch) + word(args, DOWN.down_off)
    for i in range(n):
        store8(y + OCTET_BYTES * i, splat8(0.0))
    for rank in range(n_used):
        expert = word(ids, rank)
        if is_expert(expert, word(args, DOWN.n_expert)):
            dot_run(word(args, DOWN.down), expert, octet, n, act + rank * word(args, DOWN.act_stride), dot)
            weight = splat8(load_f32(ids + 8 * n_used + 4 * rank))
            for i in range(0, OCTET_BYTES * n, OCTET_BYTES):
                store8(y + i, fma8(weight, load8(dot + i), load8(y + i)))


@op
def moe_down_many(control, args, thread):
    """Claim (expert, run) for all entries of the step; results stay apart, for `moe_combine`."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    down, n_expert = word(args, DOWN.down), word(args, DOWN.n_expert)
    lists = scratch + word(args, DOWN.list_scratch)
    n_entries = word(control, abi.STEP_N_ROWS) * word(args, DOWN.n_used)
    n_active = group_entries(word(args, DOWN.ids), n_entries, n_expert, lists)
    n_octets, stride = word(down, abi.TENSOR_N_OCTETS), word(down, abi.TENSOR_OCTET_STRIDE)
    work = n_active * n_octets * stride
    run = run_octets(work, stride, word(thread, abi.THREAD_N_THREADS), RUN_OCTETS_MANY)
    runs = n_runs(n_octets, run)
    unit = first_unit(thread)
    while unit < n_active * runs:
        expert, octet = active_expert(lists, n_expert, unit // runs), unit % runs * run
        entries, count = entries_of(lists, n_expert, expert), n_entries_of(lists, expert)
        for first in range(0, count, ROW_BLOCK):
            n_tok, at = min(count - first, ROW_BLOCK), entries + 8 * first
            down_run_many(args, scratch, expert, octet, min(run, n_octets - octet), at, n_tok)
        unit = claim(thread)


@inline_kernel
def down_run_many(args, scratch, expert, octet, n, entries, n_tok):
    """One run of down for n_tok entries of an expert, straight to their rows of d where all of it exists."""
    down, tmp = word(args, DOWN.down), scratch + word(args, DOWN.tmp_scratch)
    act, act_stride = word(args, DOWN.act_shared) + word(args, DOWN.down_off), word(args, DOWN.act_stride)
    d, d_stride = word(args, DOWN.d) + column_bytes(down, octet), word(args, DOWN.d_stride)
    whole, tile = rows_from(down, octet) >= ROW_GROUP * n, tmp + TMP_TILE
    for t in range(n_tok):
        entry = word(entries, t)
        out = d + entry * d_stride if whole else tile + t * TILE_ROW_BYTES
        list_row(tmp, t, act + entry * act_stride, out)
    dots(down, octet_address(down, expert, octet), word(down, abi.TENSOR_OCTET_STRIDE), n, n_tok, tmp)
    if not whole:
        for t in range(n_tok):
            for i in range(n):
                y = load8(tile + t * TILE_ROW_BYTES + OCTET_BYTES * i)
                to = d + word(entries, t) * d_stride + OCTET_BYTES * i
                store_octet(to, y, rows_from(down, octet + i))


@op
def moe_combine(control, args, thread):
    """x += weighted sum of d over the ranks: the team shares the octets of all rows evenly."""
    n_rows, n_embd = word(control, abi.STEP_N_ROWS), word(args, COMBINE.n_embd)
    row_octets = (n_embd + 7) // 8
    total, team_size = n_rows * row_octets, word(thread, abi.THREAD_TEAM_SIZE)
    member = word(thread, abi.THREAD_TEAM_INDEX)
    for i in range(total * member // team_size, total * (member + 1) // team_size):
        row, octet = i // row_octets, i % row_octets
        y = combine_octet(args, row, octet)
        x = word(args, COMBINE.x) + row * word(args, COMBINE.x_stride) + OCTET_BYTES * octet
        add_octet(x, y, n_embd - ROW_GROUP * octet)


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
