"""What a loaded model and a finished generation report: plain values, no behaviour.

Owns these records and what each field means; knows neither how they are measured nor how they are shown.
Fields end in their unit: `_s` seconds, `_tok_s` tokens a second, `_us_` microseconds, `bytes` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

StopReason = Literal["eos", "length", "context", "interrupted"]
"""An end token; `max_tokens` reached; the context full; an interrupt, or closed before the end."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel that the model's program calls, and the variant of it that was taken."""

    op: str
    """Operation, with the stored type of the matrix where it reads one, such as "moe_down IQ4_XS"."""
    variant: str
    """Instruction set; "vector" where one source serves every CPU."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node process."""

    node: int
    workers: int
    """Pinned pool threads, the thread on the host's core not counted."""
    cpus: tuple[int, ...]
    """CPU of each of the node's threads; empty if they are not pinned."""
    bytes: int
    """Weights that the node holds, as stored."""
    placed_share: float | None
    """Share of the node's pages seen to lie on the node, 0 to 1; None where that was not looked at."""
    verified: str
    """How `placed_share` is known; "unknown" if it is not."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model."""

    path: str
    arch: str
    types: Mapping[str, int]
    """Tensors of each ggml type in the file."""
    load_s: float
    compile_s: float
    """Compiling kernels, or reading them from the cache; no part of `load_s`."""
    weight_bytes_per_token: int
    """Stored weights that one decoded token reads, over all nodes."""
    workers: int
    threads: int
    """All threads that compute: the workers and the one on the host's core."""
    split_on: bool
    split_reason: str
    nodes: tuple[NodeInfo, ...]
    kernels: tuple[KernelUse, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished, or interrupted, generation. A figure is None if nothing was measured for it."""

    text: str
    prompt_tokens: int
    generated_tokens: int
    token_ids: tuple[int, ...]
    """The generated tokens; an end token that stopped the generation is not among them."""
    stop_reason: StopReason
    prompt_tok_s: float | None
    decode_tok_s: float | None
    """Over the tokens after the first, which the prompt's last step yields."""
    ttft_s: float | None
    """From the call to the first token's id."""
    wait_us_per_token: float | None
    """Time at barriers per decoding step, mean over the threads."""
    seed: int | None = None
    """Seed of a sampled generation, also where it was drawn at random; None if it was greedy."""

    def __post_init__(self) -> None:
        if self.stop_reason not in get_args(StopReason):
            raise ValueError(f"stop_reason {self.stop_reason!r}, expected one of {get_args(StopReason)}")
        if self.generated_tokens != len(self.token_ids):
            raise ValueError(f"{self.generated_tokens} generated tokens, but {len(self.token_ids)} ids")
        for name in ("prompt_tok_s", "decode_tok_s", "ttft_s", "wait_us_per_token"):
            figure = getattr(self, name)
            if figure is not None and not math.isfinite(figure):
                raise ValueError(f"{name} is {figure}, expected a finite number or None")
