"""A language model, loaded and ready: the library's front door.

The only place where file, machine, plan, program and pool meet.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strata_jit.engine.embedding import EmbeddingRows
from strata_jit.engine.generation import Generation
from strata_jit.engine.ngram import NgramRows
from strata_jit.engine.perplexity import DEFAULT_WINDOW, OnWindow, PerplexityResult, measure, text_ids
from strata_jit.engine.prompt import encode_prompt
from strata_jit.engine.results import ModelInfo, NodeInfo
from strata_jit.engine.sample import Sampling
from strata_jit.engine.setup import Progress, check_pool_options, node_specs
from strata_jit.engine.setup import spin_us as _spin
from strata_jit.engine.sizes import plan_model
from strata_jit.engine.steps import Stepper
from strata_jit.engine.traffic import kernel_uses, weight_bytes_per_token
from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.reader import GGUFFile, open_gguf
from strata_jit.gguf.tokenizer import Tokenizer
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.placement import Plan, PlanOptions, helper_cpus
from strata_jit.placement.helpers import OFF
from strata_jit.pool.host import Pool
from strata_jit.pool.program import PoolSpec
from strata_jit.topology.affinity import confine_threads
from strata_jit.topology.machine import read_machine


def load(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    ctx: int | None = None,
    chunk: int | None = None,
    isa: str | None = None,
    reference: bool = False,
    numa_pool: str | None = None,
    test_slices: int | None = None,
    spin_us: int | None = None,
    pool_affinity: str | None = None,
    pool_tasks: int = 0,
    exchange_rotate: bool = False,
    route_tail_skip: int = 0,
    aux_cpus: str = "off",
    arena: Literal["memfd", "anon"] = "memfd",
    tokenizer: Tokenizer | None = None,
    on_progress: Progress | None = None,
) -> Model:
    """Load a GGUF language model into a pool of pinned threads.

    path         a GGUF file, of a split model any part
    workers      pool threads beside the one on the host's core; None: one per further physical core
    ctx          positions of KV memory; None: 4096, at most the model's own context
    chunk        tokens of a prompt that one step takes; None: 512
    isa          "avx512vnni", "avxvnni", "avx2" or "portable"; None: the best that the CPU has
    reference    float32 weights and activations: slow and exact, the judge of the fast path
    numa_pool    None, "0", "1" or "test": whether to split over NUMA nodes
    test_slices  node processes in test mode; None: 2
    spin_us      microseconds that an idle thread spins before it sleeps; None: 200
    pool_affinity  "all", "auto" or "p-cores": which cores of a hybrid chip work; None: "auto"
    pool_tasks   pieces into which each node cuts its rows of an operation on one token, about; 0: automatic
    exchange_rotate  whether experts may move to memory of unknown place, which a split cannot have
    route_tail_skip  lossy: leave out experts that every token of a step ranks there or later, from 0; 0: none
    aux_cpus     CPUs of the node processes' threads that compute nothing, and of all threads of this process
                 but the calling one, for good: a list such as "0-3", "auto" (those left free by the team);
                 "off": as they are
    arena        where weights lie: "memfd" or "anon"
    tokenizer    the file's own, if it was built already
    on_progress  called as on_progress(stage, done, total): "compile" counts kernels, "load" bytes

    Raises ModelError for a file that cannot be run, UsageError for an option that makes no sense, PoolError
    or NodeDied where a node process fails. Close the model, or use it in a `with` statement.
    """
    check_pool_options(spin_us, arena, pool_tasks)
    file = open_gguf(path)
    options = PlanOptions(
        workers=workers,
        numa_pool=numa_pool,
        test_slices=test_slices,
        pool_affinity=pool_affinity,
        exchange_rotate=exchange_rotate,
    )
    machine = read_machine()
    ready = plan_model(
        file,
        machine,
        options,
        ctx=ctx,
        chunk=chunk,
        reference=reference,
        route_tail_skip=route_tail_skip,
    )
    language_model, limits, planned = ready.model, ready.limits, ready.plan
    helpers = None if aux_cpus == OFF else tuple(sorted(helper_cpus(machine, planned, aux_cpus)))
    spec = PoolSpec(
        program=language_model.program,
        nodes=node_specs(planned, language_model.program),
        files=tuple(str(part) for part in file.parts),
        max_rows=limits.max_rows,
        n_seq=limits.n_seq,
        kv_blocks=language_model.kv_blocks,
        isa=isa,
        reference=reference,
        spin_us=_spin(planned, spin_us),
        arena=arena,
        helper_cpus=helpers,
        tasks=pool_tasks,
    )
    tokenizer = tokenizer or Tokenizer.from_gguf(file)
    if tokenizer.n_vocab > language_model.n_vocab:
        found = f"{language_model.n_vocab} rows"
        raise ModelError.at(
            file.path, "tensor token_embd.weight", found, f"{tokenizer.n_vocab}, a row a token"
        )
    if helpers is not None:
        confine_threads(helpers, but_this=True)
    pool = Pool(spec, on_progress)
    try:
        return Model(file, tokenizer, planned, limits, language_model, pool)
    except BaseException:
        pool.close()
        raise


class Model:
    """A loaded model; made by `load`."""

    def __init__(
        self,
        file: GGUFFile,
        tokenizer: Tokenizer,
        planned: Plan,
        limits: StepLimits,
        language_model: LanguageModel,
        pool: Pool,
    ) -> None:
        self.tokenizer = tokenizer
        self.n_ctx = limits.n_ctx
        self._is_open = True
        self._file, self._pool = file, pool
        self._skipped = language_model.skipped
        self._embedding = EmbeddingRows(file, language_model.token_embd, language_model.embedding_scale)
        table = language_model.ngram
        self._ngrams = NgramRows(file, table) if table else None
        self._stepper = Stepper(
            pool, language_model, self._embedding, limits.max_rows, limits.n_nodes, self._ngrams
        )
        self.info = _info(file, planned, language_model, pool)

    def chat(self, text: str, system: str | None = None, *, think: bool | None = None) -> list[int]:
        """Token ids of a user's message in the model's chat template. UsageError if the file has none.

        think  whether the model is to think before it answers, where its template asks; None: its default
        """
        return encode_prompt(self._file, text, system, False, self.tokenizer, think)

    def generate(
        self, prompt: str | Sequence[int], *, max_tokens: int = 128, sampling: Sampling | None = None
    ) -> Generation:
        """Continue `prompt`: token ids, or text taken as it is (for a chat, give `chat(text)`).

        An iterator of text pieces; afterwards `.result` holds token ids and figures. UsageError for a prompt
        that is empty or does not fit into the context.
        """
        self._check_open()
        ids = self._token_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if max_tokens < 0:
            raise UsageError(f"max_tokens: found {max_tokens}, expected 0 or more")
        return Generation(
            self._stepper,
            self.tokenizer,
            ids,
            max_tokens,
            self.n_ctx,
            sampling or Sampling(),
            self._mean_wait_ns,
        )

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token of `ids`, from an empty context: float32[n, n_vocab]."""
        self._check_open()
        tokens = self._token_ids(ids)
        user = object()
        self._stepper.begin(user)
        return np.concatenate([part.copy() for part in self._stepper.all_logits(user, tokens)])

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        n_ctx: int | None = None,
        kl_base: str | os.PathLike[str] | None = None,
        kl: str | os.PathLike[str] | None = None,
        on_window: OnWindow | None = None,
    ) -> PerplexityResult:
        """How well the model predicts a text, as llama.cpp's llama-perplexity measures it.

        text       or its token ids, which then begin as the model's prompts do
        n_ctx      tokens of a window, of which the second half is scored; None: 512, at most the context
        kl_base    a file to write the model's distributions to, for others to be compared with
        kl         such a file of a base model, with the same vocabulary, text and window
        on_window  called after each window as on_window(done, total, perplexity so far)

        UsageError for a text of less than one window, a window beyond the context, or another base.
        """
        self._check_open()
        n_ctx = min(DEFAULT_WINDOW, self.n_ctx) if n_ctx is None else n_ctx
        if n_ctx > self.n_ctx:
            raise UsageError(f"n_ctx: found a window of {n_ctx}, expected at most the context, {self.n_ctx}")
        ids = self._as_ids(text_ids(self.tokenizer, text) if isinstance(text, str) else text)

        def logits_of(tokens: Sequence[int], first: int) -> Iterator[NDArray[np.float32]]:
            user = object()
            self._stepper.begin(user)
            return self._stepper.all_logits(user, tokens, first)

        return measure(
            logits_of, self.tokenizer, ids, n_ctx, kl_base=kl_base, kl=kl, on_window=on_window
        )

    def experts_skipped(self) -> int:
        """Choices of experts that `route_tail_skip` has left out so far."""
        self._check_open()
        if self._skipped is None:
            return 0
        return int(self._pool.buffer(self._skipped, np.dtype(np.int64))[0])

    def op_seconds(self) -> dict[str, float]:
        """Seconds inside operations so far, by kind, as the first thread of each node counts: their mean."""
        self._check_open()
        nodes = self._pool.stats().kind_ns
        return {kind: sum(node[kind] for node in nodes) / len(nodes) / 1e9 for kind in nodes[0]}

    def close(self) -> None:
        """End the node processes and free all memory; may be called again."""
        self._is_open = False
        self._pool.close()
        self._embedding.close()
        if self._ngrams is not None:
            self._ngrams.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mean_wait_ns(self) -> float:
        waits = self._pool.stats().wait_ns
        return sum(waits) / len(waits)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError("the model is closed: load it again")

    def _token_ids(self, ids: Sequence[int]) -> list[int]:
        checked = self._as_ids(ids)
        self._check_prompt(checked)
        return checked

    @staticmethod
    def _as_ids(ids: Sequence[int]) -> list[int]:
        try:
            return [operator.index(token) for token in ids]
        except TypeError:
            raise UsageError("token ids: expected a sequence of integers") from None

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) == 0:
            raise UsageError("the prompt has no tokens: give a text")
        if len(ids) > self.n_ctx:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the context only {self.n_ctx}: give a larger ctx"
            )


def _info(file: GGUFFile, planned: Plan, model: LanguageModel, pool: Pool) -> ModelInfo:
    nodes = tuple(
        NodeInfo(
            node=node.node,
            # the thread on the host's core is not counted as a worker
            workers=node.threads - (i == 0),
            cpus=node.cpus or (),
            bytes=report.arena_bytes,
            placed_share=None,
            verified="unknown",
        )
        for i, (node, report) in enumerate(zip(planned.nodes, pool.nodes, strict=True))
    )
    return ModelInfo(
        path=str(file.path),
        arch=model.arch,
        types=dict(Counter(t.type.name for t in file.tensors.values())),
        load_s=pool.load_s,
        compile_s=pool.compile_s,
        weight_bytes_per_token=weight_bytes_per_token(pool.spec.program, model.n_expert_used),
        workers=planned.n_workers,
        threads=planned.threads,
        split_on=planned.split.on,
        split_reason=planned.split.reason,
        nodes=nodes,
        kernels=kernel_uses(pool.spec.program, {use.op: use.variant for use in pool.kernels}),
        warnings=planned.warnings + model.notes,
    )
