"""Policy-gradient losses of sampled completions."""

from torch import Tensor


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """`- A log pi(a | h)` of each completion (REINFORCE, Williams 1992); its gradient is the policy gradient.

    There is no importance ratio and no clipping: the completions are taken for samples of the policy that is trained.

    Args:
        logprobs: `log pi(a | h)`, summed over the completion's tokens, `[B]`, with a graph.
        advantages: `[B]`; no gradient flows into them.

    Returns:
        `[B]`, in the dtype of `logprobs`.
    """
    return -advantages.detach().to(logprobs) * logprobs
