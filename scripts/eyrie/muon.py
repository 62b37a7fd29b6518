"""Muon for a CPU without bfloat16 arithmetic."""

import torch


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon, whose Newton-Schulz iteration is in float32 instead of bfloat16.

    Where bfloat16 is emulated, an iteration of torch's takes a hundred times as long. The
    iteration, the coefficients and the scaling are torch's ("match_rms_adamw": updates have the
    size of AdamW's, https://arxiv.org/abs/2502.16982).
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters, gradients, momenta = [], [], []
            self._init_group(group, parameters, gradients, momenta)
            for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(momentum, group["momentum"])
                update = orthogonal(update, group["ns_coefficients"], group["ns_steps"])
                rate = group["lr"] * 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-rate)


def orthogonal(matrix: torch.Tensor, coefficients: tuple, steps: int) -> torch.Tensor:
    """Bring the singular values of `matrix` [m, n] near 1 by a quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
