"""`current_copy`: frozen, and apart from the live team."""

import torch

from comlrl_core.comparators.current_copy import current_copy


def test_later_updates_do_not_reach_the_copy(team) -> None:
    comparator = current_copy(team, "cpu")
    assert comparator.policy == "current_copy" and comparator.team is not team
    before = team.fingerprint()
    assert comparator.team.fingerprint() == before
    with torch.no_grad():
        next(team.models[0].parameters()).add_(1.0)
    assert team.fingerprint() != before and comparator.team.fingerprint() == before


def test_the_copy_holds_no_gradients(team) -> None:
    copied = current_copy(team, None).team
    assert not any(p.requires_grad for model in copied.models for p in model.parameters())
    assert all(p.requires_grad for model in team.models for p in model.parameters())
    assert copied.formatters == team.formatters
