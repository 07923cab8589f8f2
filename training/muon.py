"""Muon: steps of matrices along the nearest orthogonal matrix of their momentum (Jordan et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

# Polynomials a x + b x^3 + c x^5 that bring singular values from 0.001 up near 1, one after the other: the
# first three of Polar Express (Amsel et al., 2025). A step needs no more accuracy.
POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
)


def orthogonalise(m: Tensor) -> Tensor:
    """Matrices [..., out, in] with singular values near 1 in place of their own."""
    tall = m.shape[-2] > m.shape[-1]
    x = m.mT if tall else m
    x = x / (1.01 * x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in POLYNOMIALS:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For parameters [..., out, in]; every matrix of a stack of experts is treated alone."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonalise(p.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-group["lr"] * scale)
