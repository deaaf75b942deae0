"""SyncBatchNorm: batch normalization with the statistics of all ranks' batches.

The mean and variance of all samples follow from each rank's count, sum and sum of squared distances, which are added up
(parallel variance: Chan, Golub and LeVeque 1979). The gradient of the input needs two more sums over all ranks (Ioffe
and Szegedy 2015, section 3).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from elasticstate.horovod import world
from elasticstate.horovod.allreduce import Op, allreduce
from elasticstate.horovod.collectives import allgather


class SyncBatchNorm(nn.SyncBatchNorm):
    """BatchNorm over the batches of all ranks, for inputs ``[N, C, ...]``. The arguments are those of BatchNorm.

    N may differ between ranks. Unlike in Horovod and torch, the input may be on the CPU, too. In evaluation, and in a
    world of one, it is plain BatchNorm. All ranks must call it equally often.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        mean, variance = self.running_mean, self.running_var
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not uses_batch or not world.is_initialized() or world.size() == 1:
            if self.training and not self.track_running_stats:
                mean = variance = None
            return functional.batch_norm(
                input, mean, variance, self.weight, self.bias, uses_batch, self._share(), self.eps
            )
        output, *statistics = cast(Any, _Normalize).apply(input, self.weight, self.bias, self.eps)
        if self.training and mean is not None and variance is not None:
            of_all, variance_of_all, count = statistics
            with torch.no_grad():
                mean.lerp_(of_all.to(mean.dtype), self._share())
                unbiased = variance_of_all * (count / (count - 1).clamp(min=1))
                variance.lerp_(unbiased.to(variance.dtype), self._share())
        return cast(torch.Tensor, output)

    def _share(self) -> float:
        """Return the share of this batch in the running statistics."""
        if self.momentum is not None:
            return self.momentum
        return 1.0 / max(1.0, float(self.num_batches_tracked)) if self.num_batches_tracked is not None else 0.0


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [0, *range(2, input.dim())]
        values = input.detach().to(torch.promote_types(input.dtype, torch.float32))
        samples = values.numel() // values.shape[1]
        own_mean = values.mean(dims) if samples else values.new_zeros(values.shape[1])
        own_squares = (values - _column(own_mean, values)).square().sum(dims)
        count = own_mean.new_full((1,), samples)
        rows = allgather(torch.cat([count, own_mean, own_squares])[None])
        counts, means, squares = rows[:, :1], rows[:, 1 : 1 + len(own_mean)], rows[:, 1 + len(own_mean) :]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        scale = (variance + eps).rsqrt()
        normalized = (values - _column(mean, values)) * _column(scale, values)
        ctx.save_for_backward(normalized, weight, scale, total)
        ctx.dims, ctx.dtype, ctx.has_bias = dims, input.dtype, bias is not None
        output = normalized if weight is None else normalized * _column(weight, values)
        output = output if bias is None else output + _column(bias, values)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        normalized, weight, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        of_bias, of_weight = gradient.sum(ctx.dims), (gradient * normalized).sum(ctx.dims)
        sums = allreduce(torch.stack([of_bias, of_weight]), op=Op.SUM) / total
        inner = gradient - _column(sums[0], gradient) - normalized * _column(sums[1], gradient)
        factor = scale if weight is None else scale * weight
        of_input = (inner * _column(factor, gradient)).to(ctx.dtype)
        if weight is None:
            return of_input, None, None, None
        return of_input, of_weight.to(weight.dtype), of_bias.to(weight.dtype) if ctx.has_bias else None, None


def _column(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``[C]`` as ``[1, C, 1, ...]``."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
