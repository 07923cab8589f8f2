"""Word offsets of the structures that nopython code reads by address.

Owns the layout of the step block, the thread context, the tensor record and the program row; knows no
kernel and imports nothing, so that the host process (which never loads Numba) can share it.
All offsets count int64 words unless a name ends in `_BYTES`.
"""

WORD_BYTES = 8
LINE_BYTES = 64
ROW_GROUP = 8
"""Rows of one octet: the unit in which every matrix is stored, cut and claimed."""
KV_BLOCK = 256
"""Positions of one KV block."""

# --- step block: written by the host before each step, in shared memory, read by every thread -------------
STEP_FIRST_OP = 0
STEP_N_OPS = 1
STEP_N_ROWS = 2
"""Rows (token, position, sequence, want_logits) of the step."""
STEP_N_OUT = 3
"""Rows whose logits are wanted."""
STEP_ROWS = 4
"""Byte offset from the step block to int64[n_rows][ROW_WORDS]."""
STEP_OUT_ROWS = 5
"""Byte offset from the step block to int64[n_out]: row indices whose logits are wanted, ascending."""
STEP_KV_TABLE = 6
"""Byte offset from the step block to int64[n_seq][kv_table_stride]: KV slot of (sequence, block)."""
STEP_KV_TABLE_STRIDE = 7
STEP_TASKS = 8
"""Runs into which each node cuts its rows of a one-row op; 0: as many as `runs` thinks best."""
MAX_TASKS = 4096
STEP_WORDS = 16

ROW_TOKEN = 0
ROW_POSITION = 1
ROW_SEQUENCE = 2
ROW_WANT_LOGITS = 3
ROW_WORDS = 4

# --- program row -------------------------------------------------------------------------------------------
OP_COUNT_FIELD = 0
"""Step-block word that says how many rows the op sees: STEP_N_ROWS or STEP_N_OUT. 0 rows skip the op."""
OP_ADDR_ONE = 1
OP_BARRIER_ONE = 2
OP_ADDR_MANY = 3
OP_BARRIER_MANY = 4
OP_ARGS = 5
"""Address of the op's int64 arguments, resolved for this node."""
OP_KIND = 6
"""Index of the op's metric class, for time accounting."""
OP_WORDS = 8

# --- thread context ----------------------------------------------------------------------------------------
THREAD_INDEX = 0
"""Index of the thread within its node process."""
THREAD_N_THREADS = 1
"""Threads of this node process."""
THREAD_NODE = 2
"""Index of the node in the plan, 0 .. n_node-1 (not the kernel's node id)."""
THREAD_N_NODES = 3
THREAD_TEAM_INDEX = 4
"""Index of the thread in the whole team, 0 .. team_size-1."""
THREAD_TEAM_SIZE = 5
THREAD_SCRATCH = 6
"""Address of this thread's private scratch, first touched by it, 64-byte aligned."""
THREAD_CLAIM = 7
"""Address of the node's claim word."""
THREAD_KV = 8
"""Address of the node's KV memory."""
THREAD_CLAIM_LOG = 9
"""Address of the claim log in debug mode, else 0."""
THREAD_STATE = 10
"""Address of the node's recurrent state: of it, each thread touches only what it computes."""
THREAD_PRIVATE = 16
"""First word that only the interpreter and the barrier use."""
THREAD_WORDS = 64

# --- tensor record -----------------------------------------------------------------------------------------
TENSOR_ADDR = 0
"""Matrix: address of the first octet of this node's slice. Vector: address of float32[n_cols]."""
TENSOR_ROW_START = 1
"""First output row of the slice, a multiple of ROW_GROUP."""
TENSOR_ROW_STOP = 2
"""End of the slice; less than a multiple of ROW_GROUP only where the matrix ends."""
TENSOR_N_OCTETS = 3
"""Octets of the slice (of one expert, if there are experts); 0 for an empty slice."""
TENSOR_N_COLS = 4
TENSOR_OCTET_STRIDE = 5
"""Bytes from one octet to the next (twice the octet's own size where gate and up alternate)."""
TENSOR_EXPERT_STRIDE = 6
"""Bytes from one expert to the next; 0 where there are none."""
TENSOR_DOT_ONE = 7
"""Address of the one-token kernel of the tensor's type."""
TENSOR_DOT_MANY = 8
"""Address of the many-token kernel of the tensor's type."""
TENSOR_N_EXPERT = 9
TENSOR_N_ROWS = 10
"""Output rows of the whole matrix, over all nodes."""
TENSOR_WORDS = 16
