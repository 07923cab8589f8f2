"""The ops of a step program: their names, functions, barriers and arguments.

Owns the one table that program builders (host process) and op kernels (node process) share: a builder names
an argument, a kernel reads it by the same name from `arg_index(op)`, whose fields Numba freezes to constants.
Imports no Numba and no kernel; functions are named as "module:attribute" and resolved by the node process.

An argument list is written as "name:kind ...", the kinds being
  b  buffer: address in this process's mapping of the shared buffers
  t  tensor: address of its record in this node's tensor table (`t?`: or 0 for none)
  s  scratch: byte offset in the scratch of the thread
  i  integer
  f  float32, passed as its bits
Every argument is one int64 word. Strides and offsets are bytes, `n_...` are counts.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from strata_jit.kernels.abi import KV_BLOCK

KINDS = ("rope", "norm", "linear", "attention", "delta_net", "route", "experts")
"""Metric classes; a program row carries the index of its op's class."""

GATE_SILU = 0
GATE_SIGMOID = 1
"""What a delta net's output is multiplied with: silu(z) or sigmoid(z)."""
DELTA_COLUMNS = 16
"""Columns of a delta net's state that are computed together, and lie together: a unit."""
DELTA_TAPS = 4
"""Inputs that the convolution of a delta net reads: a token's own and the three before."""

ROPE_NEOX = 0
"""Rotate pairs (i, i + n_rot/2)."""
ROPE_NORM = 1
"""Rotate pairs (2i, 2i + 1)."""

ROUTE_GIVEN = 0
"""The host has written ids and weights."""
ROUTE_SOFTMAX = 1
"""By softmax over all experts. From here on the numbers of GGUF's `expert_gating_func`."""
ROUTE_SIGMOID = 2
"""By the sigmoid of each logit."""
ROUTE_TOP_SOFTMAX = 3
"""By the logits; the weights are the softmax over the chosen ones."""

GLU_SWIGLU = 0
"""silu(gate) * up."""
GLU_SWIGLU_OAI = 1
"""gpt-oss: gate at most 7, up within -7 .. 7; gate * sigmoid(1.702 * gate) * (up + 1)."""

_ACT = "act_scratch:s act_shared:b act_stride:i off_f32:i off_q256:i off_q32:i"
"""Where activation rows go: one row in the thread scratch (one-row step) or rows in a shared buffer, and the
offset of each kind's planes in a row, -1 for a kind that nobody reads. Kernels rely on this order."""

_READ_ACT = "act_scratch:s act_shared:b act_stride:i"

_LINEAR = f"{_READ_ACT} count:i tmp_scratch:s n_segments:i"
_SEGMENT = "tensor:t act_off:i out:b out_stride:i out_offset:i add:i bias:t? scale:f sigmoid:i"

_QKV = (
    "qkv:b qkv_stride:i q_off:i q_stride:i k_off:i v_off:i q_norm:t? k_norm:t? eps:f angles:b n_rot:i "
    "rope_mode:i n_head:i n_head_kv:i head_dim:i value_dim:i layer_off:i slot_bytes:i work_scratch:s"
)
"""q_stride: bytes from a query head to the next, 4 * head_dim unless gates stand between.
A q or k norm has head_dim weights, for each head, or as many as all heads, for all of them together;
`work_scratch` takes `attention_scratch_bytes`; `layer_off` is the layer's place in a KV slot."""

_SELECT = "mask_scratch:s mask:b mask_stride:i ratio:i"
"""What an indexer has selected, as `kernels/selection.py` reads it: int64[kv_blocks], in the thread scratch
(one-row step) or a row of a shared buffer. ratio 0: all is seen. Not together with a window."""

_MERGE = (
    "partial:b partial_blocks:i n_head:i value_dim:i window:i sinks:t? gate:b gate_row:i gate_off:i "
    f"gate_head:i out_scratch:s {_SELECT} {_ACT}"
)
"""gate: float32[value_dim] of each head, at row * gate_row + gate_off + head * gate_head; none if gate_off is
-1."""

_STREAMS = "streams_scratch:s streams:b streams_stride:i n_stream:i n:i"
"""Hyper-connections: the residual streams float32[n_stream][n] of a row, in the thread scratch (one-row step,
every thread has its own) or in a shared buffer."""

_INDEX = (
    "index_qk:b index_stride:i index_q_off:i index_k_off:i q_norm:t k_norm:t eps:f angles:b freqs:b "
    "angle_factor:f n_rot:i n_head:i head_dim:i ratio:i n_best:i layer_off:i slot_bytes:i work_scratch:s"
)
"""`ratio`: positions of an index block; `n_best`: blocks that a row attends to besides its incomplete one;
`layer_off`: the place of the layer's index keys in a KV slot; `work_scratch` takes `index_scratch_bytes`."""


_DELTA = (
    "proj:b proj_stride:i q_off:i k_off:i v_off:i z_off:i gate_off:i qk_stride:i vz_stride:i gate_group:i "
    "n_head_k:i n_head_v:i head_dim:i k_run:i conv:t dt:t a:t history:b history_off:i history_stride:i "
    "eps:f q_scale:f gates:b"
)
"""A row of `proj` holds the projections q, k, v, z and the gates' beta and alpha, float32.

qk_stride: bytes from a q or k head to the next. vz_stride: bytes from the v (or z) heads of one group, of
n_head_v / n_head_k heads side by side, to the next group's. gate_group: heads whose beta stand side by side,
their alpha behind. k_run: v heads in a row that read the same k head; v head h reads h // k_run % n_head_k.
conv: float32[channels][DELTA_TAPS], channels q | k | v. history: float32[DELTA_TAPS][channels] at
history_off + sequence * history_stride, the input at position p in place p mod DELTA_TAPS.
gates: float32[row][n_head_v][2], beta and decay, of a step of many rows."""


@dataclass(frozen=True, slots=True)
class OpDef:
    """One op: what to call for one row and for many, where the team meets, and the arguments in order.

    `one` or `many` is None where the op has nothing to do in that case. `repeat` lists the arguments of one
    segment, which follow the others `n_segments` times.
    """

    name: str
    one: str | None
    many: str | None
    barrier_one: bool
    barrier_many: bool
    kind: str
    fields: tuple[str, ...]
    field_kinds: tuple[str, ...]
    repeat: tuple[str, ...] = ()
    repeat_kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"op {self.name}: kind {self.kind!r} is not one of {KINDS}")


def _op(
    name: str,
    kind: str,
    functions: str | tuple[str | None, str | None],
    barriers: tuple[bool, bool],
    fields: str,
    repeat: str = "",
) -> OpDef:
    """`functions`: "module:attribute" below kernels/, one for both forms or a pair (one row, many rows)."""
    pair = (functions, functions) if isinstance(functions, str) else functions
    one, many = (f and f"strata_jit.kernels.{f}" for f in pair)
    return OpDef(name, one, many, *barriers, kind, *_split(fields), *_split(repeat))


def _split(fields: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    pairs = [f.split(":") for f in fields.split()]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


# Barriers after the (one-row, many-row) form. At one row, cheap ops are done redundantly by every thread.
_BOTH = (True, True)
_MANY = (False, True)
_NONE = (False, False)
"""For ops that a thread follows with another of the same rows."""

_ALL = (
    # angles: float32[row][n_half][2] = factor * (cos, sin)(position * freqs[i]); freqs: float64[n_half]
    _op("rope_angles", "rope", "rope:rope_angles", _BOTH, "freqs:b angles:b n_half:i factor:f"),
    # RMS norm (weight 0: none), then activation planes. gather 1: the i-th row is x[out_rows[i]], and the op
    # counts the rows whose logits are wanted. tmp_scratch: float32[n]
    _op(
        "norm_quant",
        "norm",
        "norm:norm_quant",
        _MANY,
        f"x:b x_stride:i weight:t? n:i eps:f gather:i tmp_scratch:s {_ACT}",
    ),
    # per segment: out = [out +] f((dot(tensor, act) + bias) * scale), f being sigmoid if `sigmoid` is 1.
    # count: the step-block word that holds the number of rows, STEP_N_ROWS or STEP_N_OUT. tmp_scratch:
    # `scratch.tmp_scratch_bytes`
    _op("linear", "linear", ("linear:linear_one", "linear:linear_many"), _BOTH, _LINEAR, repeat=_SEGMENT),
    # the same, but nothing at one row: for what another op does there on its way
    _op("linear_rows", "linear", (None, "linear:linear_many"), _MANY, _LINEAR, repeat=_SEGMENT),
    # activation planes of glu(gate, up) * sigmoid(weight) from float32 rows h: gate and up [n_ff] and the one
    # weight at byte offsets (weight_off -1: no factor). tmp_scratch: float32[n_ff]
    _op(
        "glu_quant",
        "linear",
        "glu:glu_quant",
        _MANY,
        f"h:b h_stride:i gate_off:i up_off:i weight_off:i n_ff:i activation:i tmp_scratch:s {_ACT}",
    ),
    # norms and ropes q in place; norms and ropes k, stores k and v in KV blocks (at one row, attention does)
    _op("attn_prepare", "attention", (None, "attn_prepare:attn_prepare"), _MANY, _QKV),
    # partial: float32[row][head][partial_blocks][8 + value_dim] = m, l, six unused, o. window: positions that
    # a row sees, itself included; 0: all. prepared 1: at one row too, an op before has prepared q, k and v
    _op(
        "attention",
        "attention",
        "attention:attention",
        _BOTH,
        f"{_QKV} partial:b partial_blocks:i scale:f window:i prepared:i {_SELECT}",
    ),
    # sinks: float32[n_head]; out_scratch: float32[n_head * value_dim]
    _op("attn_merge", "attention", "attn_merge:attn_merge", _MANY, _MERGE),
    # the same with an activation row for each (row, head), shared at one row too; out_scratch:
    # float32[value_dim]
    _op("attn_merge_heads", "attention", "attn_merge:attn_merge_heads", _BOTH, _MERGE),
    # q: float32[row][n_head][n_nope + n_rot]; kv: float32[row][n_latent + n_rot]. Planes of n_nope of each
    # (row, head) in the shared buffer; its n_rot, rotated, behind the n_latent of its query in queries,
    # float32[row][n_head][n_latent + n_rot]; the row's key and value in its KV block. work_scratch:
    # float32[n_latent + n_rot]
    _op(
        "mla_prepare",
        "attention",
        "mla:mla_prepare",
        _BOTH,
        "q:b q_stride:i n_head:i n_nope:i n_rot:i queries:b queries_stride:i kv:b kv_stride:i n_latent:i "
        f"kv_norm:t eps:f angles:b layer_off:i slot_bytes:i work_scratch:s {_ACT}",
    ),
    # out[row][head] = dot(matrix of the head, act of (row, head)); tensor: one matrix for each of n_head
    _op(
        "head_linear",
        "linear",
        "head_linear:head_linear",
        _BOTH,
        "act_shared:b act_stride:i act_off:i tensor:t n_head:i out:b out_stride:i head_stride:i "
        "tmp_scratch:s",
    ),
    # in place: causal convolution over time and silu of q, k, v; q and k to length 1; gates. A sequence's
    # rows stand in ascending order and go on from where its last step ended; position 0 begins it anew
    _op("delta_conv", "delta_net", (None, "delta_conv:delta_conv"), _MANY, _DELTA),
    # out: float32[row][2][n_head_v * head_dim], the output of the recurrence, then silu(z) or sigmoid(z).
    # State: float32[unit][head_dim][DELTA_COLUMNS] at state_off + sequence * state_stride. At one row it does
    # delta_conv's work too. work_scratch: `delta_scratch_bytes`
    _op(
        "delta_net",
        "delta_net",
        ("delta_net:delta_net_one", "delta_net:delta_net_many"),
        _BOTH,
        f"{_DELTA} state_off:i state_stride:i z_mode:i out:b out_stride:i work_scratch:s",
    ),
    # RMS norm of each head times the gate behind, then activation planes. tmp_scratch: float32[n_head *
    # head_dim]
    _op(
        "delta_norm",
        "delta_net",
        "delta_conv:delta_norm",
        _MANY,
        f"out:b out_stride:i n_head:i head_dim:i norm:t eps:f tmp_scratch:s {_ACT}",
    ),
    # mode: ROUTE_...; bias: float32[n_expert], added for the selection alone; only the best n_group_used of
    # n_group groups take part (n_group 1: all). route_scratch (`scratch.route_scratch_bytes`): int64
    # ids[n_used], float32 weights[n_used], then room for probabilities; ids and weights: the same as rows
    _op(
        "route",
        "route",
        ("router:route_one", "router:route_many"),
        _MANY,
        "logits:b logits_stride:i n_expert:i n_used:i mode:i bias:t? n_group:i n_group_used:i norm_w:i "
        "w_scale:f route_scratch:s ids:b weights:b",
    ),
    # lossy, and no part of a program unless asked for: the id of every expert that all rows of the step have
    # at rank `tail_skip` or later becomes -1; weights stay. skipped: int64, entries left out so far
    _op(
        "route_tail",
        "route",
        ("router:route_tail_one", "router:route_tail_many"),
        _MANY,
        "n_expert:i n_used:i tail_skip:i route_scratch:s ids:b list_scratch:s skipped:b",
    ),
    # ff[row * n_used + rank] = glu(gate + gate_bias, up + up_bias), activation: GLU_...; an id of -1 is
    # skipped. Biases are float32[n_expert][n_ff]. list_scratch and tmp_scratch, here and below, have their
    # sizes in `scratch`
    _op(
        "moe_gate_up",
        "experts",
        ("moe_gate_up:moe_gate_up_one", "moe_gate_up:moe_gate_up_many"),
        _BOTH,
        f"{_READ_ACT} gate:t gate_off:i gate_bias:t? up:t up_off:i up_bias:t? activation:i route_scratch:s "
        "ids:b n_expert:i n_used:i ff:b ff_stride:i list_scratch:s tmp_scratch:s",
    ),
    # activation planes of every entry (row, rank); act_scratch holds n_used of them
    _op(
        "ff_quant",
        "experts",
        "quantise:ff_quant",
        _MANY,
        f"ff:b ff_stride:i n_ff:i n_used:i route_scratch:s ids:b {_ACT}",
    ),
    # many rows: d[row * n_used + rank] = down(ff) + bias. One row: also what linear_rows and moe_combine do
    # with many: x = [x +] shared * scale, `shared` the down matrix that reads the planes at shared_act, then
    # x = [x +] (sum over ranks of weight * d) * scale; after a shared expert it always adds
    _op(
        "moe_down",
        "experts",
        ("moe_down:moe_down_one", "moe_down:moe_down_many"),
        _BOTH,
        f"{_READ_ACT} down:t down_off:i down_bias:t? shared:t? shared_act:s route_scratch:s ids:b weights:b "
        "n_expert:i n_used:i x:b x_stride:i add:i scale:f d:b d_stride:i list_scratch:s tmp_scratch:s",
    ),
    # x = [x +] (sum over ranks of weight * d) * scale, in moe_down's order
    _op(
        "moe_combine",
        "experts",
        (None, "moe_down:moe_combine"),
        _MANY,
        "d:b d_stride:i ids:b weights:b n_used:i n_embd:i x:b x_stride:i add:i scale:f",
    ),
    # first 1: every stream = block; else stream c += 2 * sigmoid(inject[c]) * block. gather 1: only of the
    # rows whose logits are wanted; a single one goes into every thread's scratch
    _op(
        "hc_combine",
        "norm",
        "hyper:hc_combine",
        _NONE,
        f"block:b block_stride:i inject:b inject_stride:i inject_off:i first:i gather:i {_STREAMS}",
    ),
    # activation planes, F32 among them, of the streams, each normed with its part of `weight`
    _op("hc_norm", "norm", "hyper:hc_norm", _MANY, f"{_STREAMS} weight:t eps:f gather:i {_ACT}"),
    # activation planes of silu(low), float32[n]; count as in `linear`
    _op("hc_low", "norm", "hyper:hc_low", _MANY, f"low:b low_stride:i n:i count:i tmp_scratch:s {_ACT}"),
    # activation planes of the mean over the streams of xn * gate; xn: F32 planes that `hc_norm` wrote
    _op(
        "hc_mix",
        "norm",
        "hyper:hc_mix",
        _MANY,
        "xn_scratch:s xn_shared:b xn_stride:i xn_off:i gate:b gate_stride:i n_stream:i n:i count:i "
        f"tmp_scratch:s {_ACT}",
    ),
    # streams += gate * value; that, normed, goes to the ring of the row's sequence, float32[n_ring][n_stream
    # * n], at position mod n_ring. work_scratch: `ngram_scratch_bytes`
    _op(
        "ngram_gate",
        "norm",
        "ngram:ngram_gate",
        _MANY,
        f"{_STREAMS} key_value:b key_value_stride:i key_off:i value_off:i key_norm:t query_norm:t "
        "conv_norm:t eps:f ring:b n_ring:i work_scratch:s",
    ),
    # streams += silu(convolution over time of N); conv: float32[n_stream * n][n_tap], oldest tap first
    _op(
        "ngram_conv",
        "norm",
        "ngram:ngram_conv",
        _NONE,
        f"{_STREAMS} conv:t n_tap:i dilation:i ring:b n_ring:i work_scratch:s",
    ),
    # as `attn_prepare`, which follows, for the indexer's queries and keys
    _op("index_prepare", "attention", (None, "indexer:index_prepare"), _NONE, _INDEX),
    # scores: float32[row][index blocks, in whole octets], of rows with more than n_best complete blocks
    _op("index_score", "attention", "indexer:index_score", _BOTH, f"{_INDEX} scores:b scores_stride:i"),
    # mask: int64[kv_blocks] of a row; bit i of word b: attend to index block i of KV block b
    _op(
        "index_select",
        "attention",
        "index_select:index_select",
        _MANY,
        f"scores:b scores_stride:i n_best:i {_SELECT}",
    ),
)

OPS: dict[str, OpDef] = {op.name: op for op in _ALL}


def arg_index(op: str) -> Any:
    """A named tuple: `arg_index("norm_quant").eps` is the position of `eps` among the op's arguments.

    Bind it to a module global; Numba freezes globals, so that a field costs nothing in nopython code.
    """
    names = OPS[op].fields
    return namedtuple(f"{op}_args", names)(*range(len(names)))


def repeat_index(op: str) -> Any:
    """As `arg_index` for the arguments of one segment, counted from the segment's first."""
    names = OPS[op].repeat
    return namedtuple(f"{op}_repeat", names)(*range(len(names)))


def attention_scratch_bytes(n_head: int, n_head_kv: int, head_dim: int) -> int:
    """Bytes of `work_scratch`: one key head, the query heads of a group, and their scores of one KV block."""
    group = n_head // n_head_kv
    return 4 * ((group + 1) * head_dim + group * KV_BLOCK)


def ngram_scratch_bytes(n_stream: int, n: int) -> int:
    """Bytes of `work_scratch` of the n-gram ops: N and the convolution, or two normed streams meanwhile."""
    return 2 * 4 * n_stream * n


def index_scratch_bytes(n_head: int, head_dim: int, n_rot: int) -> int:
    """Bytes of `work_scratch` of the index ops: all query heads, a key, the angles of a block."""
    return 4 * ((n_head + 1) * head_dim + n_rot)


def index_block_bytes(head_dim: int, ratio: int) -> int:
    """Bytes of a layer's index keys in a KV block: float16 of each position, float32 of each index block."""
    return 2 * head_dim * KV_BLOCK + 4 * head_dim * (KV_BLOCK // ratio)


def delta_scratch_bytes(head_dim: int) -> int:
    """Bytes of `work_scratch` of delta_net: a q and a k head, and the v of a unit."""
    return 4 * (2 * head_dim + DELTA_COLUMNS)


def delta_state_bytes(n_head_v: int, head_dim: int) -> int:
    """Bytes of the state of one layer and sequence: a float32 matrix for each v head."""
    return 4 * n_head_v * head_dim * head_dim
