"""Test cases of output heads of any size, with log-probs and entropies written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from armature.components.vlm.heads.backends import HEADS, HeadSettings

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    n_tokens: int
    vocabulary: int
    depth: int
    temperature: float = 1.0
    softcap: float | None = None
    bias: bool = False
    chunk_tokens: int = 4
    seed: int = 0

    def make(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
        """Make a head, hidden states, targets, and a mask of forbidden tokens.

        The logits that the head computes have a standard deviation of 3.
        """
        generator = torch.Generator().manual_seed(self.seed)
        head = nn.Linear(self.depth, self.vocabulary, bias=self.bias)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 3 / self.depth**0.5)
        hidden = torch.randn(self.n_tokens, self.depth, generator=generator)
        # Some targets are forbidden, and some are beyond the head's rows.
        targets = torch.randint(0, self.vocabulary + 3, (self.n_tokens,), generator=generator)
        forbidden = torch.rand(self.vocabulary, generator=generator) < 0.1
        forbidden[0] = False
        return head.to(device, dtype), hidden.to(device, dtype), targets.to(device), forbidden.to(device)


def reference(
    case: Case, head: nn.Linear, hidden: Tensor, targets: Tensor, forbidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs and entropies in a simple way.

    Return log-probs (0 for targets without probability), entropies, and a mask of targets that have a probability.
    """
    z = hidden @ head.weight.T
    if head.bias is not None:
        z = z + head.bias
    if case.softcap is not None:
        z = case.softcap * torch.tanh(z / case.softcap)
    z = z / case.temperature
    z = z - z.detach().max(1, keepdim=True).values
    p = torch.exp(z) * ~forbidden
    total = p.sum(1, keepdim=True)
    log_p = z - total.log()
    possible = (targets < case.vocabulary) & ~forbidden[targets.clamp(max=case.vocabulary - 1)]
    rows = torch.arange(len(targets), device=targets.device)
    chosen = log_p[rows, targets.where(possible, 0)] * possible
    return chosen, -(p / total * log_p).sum(1), possible


def compare(
    backend: str, case: Case, dtype: torch.dtype, *, values: float, gradients: float, device: torch.device = CPU
) -> None:
    """Compare the results of a backend with the results of `reference`.

    Args:
        values: largest absolute error of log-probs and entropies.
        gradients: largest error of gradients, relative to their norm or to 1, whichever is larger.
    """
    head, hidden, targets, forbidden = case.make(device, dtype)
    hidden.requires_grad_()
    pull = torch.randn(2, case.n_tokens, generator=torch.Generator().manual_seed(1)).to(device)
    made = HEADS[backend](HeadSettings(case.temperature, case.softcap, case.chunk_tokens), head, device)
    logprobs, entropy = made(head, hidden, targets, forbidden)
    (logprobs.masked_fill(logprobs.isinf(), 0.0) * pull[0] + entropy * pull[1]).sum().backward()

    exact_head, exact_hidden = nn.Linear(case.depth, case.vocabulary, case.bias), hidden.detach().double()
    exact_head.load_state_dict(head.state_dict())
    exact_head.to(device, torch.float64).load_state_dict(head.state_dict())
    exact_hidden.requires_grad_()
    chosen, exact_entropy, possible = reference(case, exact_head, exact_hidden, targets, forbidden)
    (chosen * pull[0] + exact_entropy * pull[1]).sum().backward()

    assert logprobs.shape == entropy.shape == (case.n_tokens,)
    assert torch.equal(logprobs.isneginf(), ~possible)
    torch.testing.assert_close(logprobs[possible].double(), chosen[possible], atol=values, rtol=0)
    torch.testing.assert_close(entropy.double(), exact_entropy, atol=values, rtol=0)
    pairs = {"hidden": (hidden.grad, exact_hidden.grad)}
    pairs |= {n: (p.grad, q.grad) for (n, p), q in zip(head.named_parameters(), exact_head.parameters(), strict=True)}
    for name, (ours, exact) in pairs.items():
        assert ours is not None and exact is not None, name
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() <= gradients * max(exact.norm().item(), 1.0), name


CASES = st.builds(
    Case,
    n_tokens=st.integers(0, 21),
    vocabulary=st.integers(2, 700),
    depth=st.integers(1, 40),
    temperature=st.sampled_from([0.7, 1.0, 1.3]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    bias=st.booleans(),
    chunk_tokens=st.integers(1, 24),
    seed=st.integers(0, 99),
)


ODD = [
    Case(0, 64, 16, bias=True),
    Case(1, 300, 20, temperature=0.7),
    Case(70, 130, 37, temperature=1.3, softcap=30.0, bias=True),
]
"""Cases without a token, with one token, and with sizes that no block divides."""


def check_unused(backend: str, chunk_tokens: int = 2) -> None:
    """Check a backend's gradient when a loss uses only the log-probs, or only the entropies."""
    case = Case(9, 50, 12)
    for used in (0, 1):
        head, hidden, _, forbidden = case.make(CPU, torch.float32)
        targets = torch.zeros(9, dtype=torch.int64)
        hidden.requires_grad_()
        HEADS[backend](HeadSettings(1.0, None, chunk_tokens), head, CPU)(head, hidden, targets, forbidden)[
            used
        ].sum().backward()
        exact = hidden.detach().double().requires_grad_()
        reference(case, head.double(), exact, targets, forbidden)[used].sum().backward()
        torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=1e-5, rtol=1e-4)
