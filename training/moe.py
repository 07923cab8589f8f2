"""The model in PyTorch: what architecture `qwen3moe` computes, for training.

RMS norms, grouped-query attention with norms over each q and k head and rotary halves, then experts picked by
a softmax router whose chosen weights are renormalised. Matrices are [out, in], those of experts [n, out, in].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The numbers of a model; names as in GGUF."""

    n_vocab: int = 4096
    n_ctx: int = 1024
    n_embd: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_exp: int = 256
    rope_base: float = 10000.0
    rms_eps: float = 1e-6


class Permute(torch.autograd.Function):
    """Rows in another order; the gradient goes back by the inverse order, which is faster than adding."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
    """Normal weights that keep the size of what they multiply, times `scale`."""
    return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)


def rope_tables(s: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [n_ctx, head_dim / 2]."""
    freq = s.rope_base ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    angle = torch.arange(s.n_ctx).float()[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [..., n, head_dim], pairs (i, i + head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q = matrix(s.n_head * s.head_dim, s.n_embd)
        self.k = matrix(s.n_head_kv * s.head_dim, s.n_embd)
        self.v = matrix(s.n_head_kv * s.head_dim, s.n_embd)
        self.output = matrix(s.n_embd, s.n_head * s.head_dim, scale=0.1)
        self.q_norm = nn.Parameter(torch.ones(s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(s.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [n_seq, n, n_embd] to the same shape."""
        s = self.s
        n_seq, n = x.shape[:2]
        q, k, v = ((x @ w.T).view(n_seq, n, -1, s.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v))
        q = rotate(F.rms_norm(q, (s.head_dim,), self.q_norm, s.rms_eps), cos[:n], sin[:n])
        k = rotate(F.rms_norm(k, (s.head_dim,), self.k_norm, s.rms_eps), cos[:n], sin[:n])
        k, v = (t.repeat_interleave(s.n_head // s.n_head_kv, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(n_seq, n, -1) @ self.output.T


class Experts(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.router = matrix(s.n_expert, s.n_embd)
        self.gate = matrix(s.n_expert, s.n_ff_exp, s.n_embd)
        self.up = matrix(s.n_expert, s.n_ff_exp, s.n_embd)
        self.down = matrix(s.n_expert, s.n_embd, s.n_ff_exp, scale=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, n_embd] to the same shape, the balance loss (1 is even), and tokens per expert [n_expert]."""
        n, k = len(x), self.s.n_expert_used
        probs = (x @ self.router.T).softmax(dim=-1)
        weights, chosen = probs.topk(k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        # One matrix product per expert: the tokens' copies are put in the experts' order and back.
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.s.n_expert)
        copies = x[:, None, :].expand(n, k, -1).reshape(n * k, -1)
        groups = Permute.apply(copies, order, inverse).split(counts.tolist())
        experts = zip(groups, self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        y = torch.cat([(F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T for rows, gate, up, down in experts])
        y = Permute.apply(y, inverse, order).view(n, k, -1)
        balance = self.s.n_expert * (counts / (n * k) * probs.mean(dim=0)).sum()
        return (y * weights[:, :, None]).sum(dim=1), balance, counts


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.attn_norm = nn.Parameter(torch.ones(s.n_embd))
        self.ffn_norm = nn.Parameter(torch.ones(s.n_embd))
        self.attn = Attention(s)
        self.experts = Experts(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = (self.s.n_embd,)
        x = x + self.attn(F.rms_norm(x, width, self.attn_norm, self.s.rms_eps), cos, sin)
        h = F.rms_norm(x, width, self.ffn_norm, self.s.rms_eps)
        y, balance, counts = self.experts(h.reshape(-1, self.s.n_embd))
        return x + y.view_as(x), balance, counts


class MoE(nn.Module):
    """The whole model; the embedding is also the output matrix."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embedding = nn.Parameter(torch.randn(s.n_vocab, s.n_embd) * 0.02)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.n_layer))
        self.output_norm = nn.Parameter(torch.ones(s.n_embd))
        cos, sin = rope_tables(s)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [n_seq, n] to logits [n_seq, n, n_vocab], the mean balance loss, counts [n_layer, n_expert]."""
        x = self.embedding[ids]
        balances, counts = [], []
        for block in self.blocks:
            x, balance, count = block(x, self.cos, self.sin)
            balances.append(balance)
            counts.append(count)
        x = F.rms_norm(x, (self.s.n_embd,), self.output_norm, self.s.rms_eps)
        return x @ self.embedding.T, torch.stack(balances).mean(), torch.stack(counts)
