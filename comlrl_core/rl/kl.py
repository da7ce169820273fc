"""Estimates of the divergence from a reference policy."""

import torch
from torch import Tensor


@torch.no_grad()
def sequence_kl(token_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sampled estimate of `KL(policy || reference)` of each completion, without a graph.

    The k3 estimator `exp(d) - d - 1` with `d = log pi_ref - log pi`, summed over the completion's tokens: unbiased for
    tokens sampled from the policy, never negative, exactly 0 where both agree (Schulman, "Approximating KL
    Divergence", 2020; used by GRPO, arXiv 2402.03300).

    Args:
        token_logprobs: of the policy, `[B, C]`.
        reference_logprobs: of the reference, `[B, C]`.
        mask: True means the token belongs to the completion, Bool `[B, C]`.

    Returns:
        `[B]`; 0 for an empty completion.
    """
    difference = (reference_logprobs - token_logprobs).masked_fill(~mask, 0.0)
    return (torch.expm1(difference) - difference).sum(dim=1)
