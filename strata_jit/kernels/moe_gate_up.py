"""The op `moe_gate_up`: ff = glu(gate . x + gate bias, up . x + up bias) for each entry (row, rank).

An entry whose id names no expert is skipped. One row: the threads share runs of octets of all its ranks; many
rows: `expert_runs`. Where gate and up octets alternate, a run is one stream of 2n octets of one type, and one
call does both. Owns no arithmetic but the biases; `glu` has the activations.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.expert_runs import share_experts
from strata_jit.kernels.glu import glu8
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
    rows_from,
    store_octet,
)
from strata_jit.kernels.scratch import OCTET_BYTES, RUN_OCTETS_MANY, TILE_ROW_BYTES, TMP_TILE
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import call6, load8, word

A = arg_index("moe_gate_up")


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
def activate_run(args, expert, octet, n, tile, ff):
    """ff = glu(gate, up) of one run and row. In a paired tile octets of gate and up alternate."""
    gate, up, activation = word(args, A.gate), word(args, A.up), word(args, A.activation)
    paired = is_paired(gate, up)
    step = 2 * OCTET_BYTES if paired else OCTET_BYTES
    up_tile = tile + OCTET_BYTES if paired else tile + TILE_ROW_BYTES // 2
    gate_bias = bias_address(word(args, A.gate_bias), expert, gate, octet)
    up_bias = bias_address(word(args, A.up_bias), expert, up, octet)
    for i in range(n):
        gates = add_bias(load8(tile + step * i), gate_bias, i)
        ups = add_bias(load8(up_tile + step * i), up_bias, i)
        store_octet(ff + OCTET_BYTES * i, glu8(activation, gates, ups), rows_from(gate, octet + i))


@op
def moe_gate_up_one(control, args, thread):
    """Claim (rank, run) of the row's experts."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    gate, up = word(args, A.gate), word(args, A.up)
    n_used, n_octets = word(args, A.n_used), word(gate, abi.TENSOR_N_OCTETS)
    step_bytes = gate_up_bytes(gate, up)
    work = n_used * n_octets * step_bytes
    run = one_row_run(control, thread, work, step_bytes, RUN_OCTETS_MANY)
    runs = n_runs(n_octets, run)
    act, tile = scratch + word(args, A.act_scratch), scratch + word(args, A.tmp_scratch)
    unit = first_unit(thread)
    while unit < n_used * runs:
        rank, octet = unit // runs, unit % runs * run
        expert = word(scratch + word(args, A.route_scratch), rank)
        if is_expert(expert, word(args, A.n_expert)):
            n = min(run, n_octets - octet)
            gate_up_run_one(args, expert, octet, n, act, tile)
            ff = word(args, A.ff) + rank * word(args, A.ff_stride) + column_bytes(gate, octet)
            activate_run(args, expert, octet, n, tile, ff)
        unit = claim(thread)


@inline_kernel
def gate_up_run_one(args, expert, octet, n, act, tile):
    """Dot products of one run of gate and up with one row."""
    gate, up = word(args, A.gate), word(args, A.up)
    gate_act, up_act = act + word(args, A.gate_off), act + word(args, A.up_off)
    if is_paired(gate, up):
        w, stride = octet_address(gate, expert, octet), word(gate, abi.TENSOR_OCTET_STRIDE) // 2
        call6(word(gate, abi.TENSOR_DOT_ONE), w, stride, 2 * n, word(gate, abi.TENSOR_N_COLS), gate_act, tile)
    else:
        dot_run(gate, expert, octet, n, gate_act, tile)
        dot_run(up, expert, octet, n, up_act, tile + TILE_ROW_BYTES // 2)


@op
def moe_gate_up_many(control, args, thread):
    """Claim (expert, run) for all rows of the step."""
    gate, n_entries = word(args, A.gate), word(control, abi.STEP_N_ROWS) * word(args, A.n_used)
    share_experts(
        gate_up_run_many,
        args,
        thread,
        word(args, A.ids),
        n_entries,
        word(args, A.n_expert),
        word(thread, abi.THREAD_SCRATCH) + word(args, A.list_scratch),
        word(gate, abi.TENSOR_N_OCTETS),
        gate_up_bytes(gate, word(args, A.up)),
    )


@inline_kernel
def gate_up_run_many(args, scratch, expert, octet, n, entries, n_tok):
    """One run of gate and up for n_tok entries of an expert."""
    gate, up = word(args, A.gate), word(args, A.up)
    tmp = scratch + word(args, A.tmp_scratch)
    tile = tmp + TMP_TILE
    stride = word(gate, abi.TENSOR_OCTET_STRIDE)
    list_gate_up(args, entries, n_tok, tmp, word(args, A.gate_off), tile)
    if is_paired(gate, up):
        dots(gate, octet_address(gate, expert, octet), stride // 2, 2 * n, n_tok, tmp)
    else:
        dots(gate, octet_address(gate, expert, octet), stride, n, n_tok, tmp)
        list_gate_up(args, entries, n_tok, tmp, word(args, A.up_off), tile + TILE_ROW_BYTES // 2)
        dots(up, octet_address(up, expert, octet), word(up, abi.TENSOR_OCTET_STRIDE), n, n_tok, tmp)
    ff = word(args, A.ff) + column_bytes(gate, octet)
    for t in range(n_tok):
        to = ff + word(entries, t) * word(args, A.ff_stride)
        activate_run(args, expert, octet, n, tile + t * TILE_ROW_BYTES, to)


@inline_kernel
def list_gate_up(args, entries, n_tok, tmp, act_off, tile):
    """List the activation rows of the entries, and a row of the tile for each."""
    act, stride = word(args, A.act_shared) + act_off, word(args, A.act_stride)
    n_used = word(args, A.n_used)
    for t in range(n_tok):
        list_row(tmp, t, act + word(entries, t) // n_used * stride, tile + t * TILE_ROW_BYTES)
