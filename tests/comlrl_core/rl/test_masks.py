"""Masks come from lengths; the first end-of-sequence id counts and nothing after it does."""

import pytest
import torch

from comlrl_core.rl.masks import completion_lengths, length_mask, position_ids


def test_first_eos_counts_and_everything_after_it_does_not() -> None:
    """eos = 2 = pad. Row 0 ends at index 2 (length 3), row 1 never (4), row 2 at once (1)."""
    ids = torch.tensor([[5, 6, 2, 2], [5, 6, 7, 8], [2, 9, 2, 2]])
    lengths = completion_lengths(ids, [2])
    assert lengths.tolist() == [3, 4, 1]
    assert length_mask(lengths, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_any_declared_eos_ends_a_sequence() -> None:
    """eos ids 2 and 3: the 3 at index 1 comes first in row 0, the 2 at index 0 in row 1."""
    ids = torch.tensor([[5, 3, 2], [2, 3, 5]])
    assert completion_lengths(ids, (2, 3)).tolist() == [2, 1]
    assert completion_lengths(ids, ()).tolist() == [3, 3]


def test_empty_completions_have_length_zero() -> None:
    assert completion_lengths(torch.empty(2, 0, dtype=torch.long), [2]).tolist() == [0, 0]
    assert length_mask(torch.tensor([0, 0]), 2).any().item() is False


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),  # left pads: the first real token is at position 0
        ([1, 1, 0, 0], [0, 1, 1, 1]),  # right pads: inside the table of positions
    ],
)
def test_positions_count_from_the_first_real_token(mask: list[int], expected: list[int]) -> None:
    assert position_ids(torch.tensor([mask])).tolist() == [expected]
    assert position_ids(torch.tensor([mask]).bool()).tolist() == [expected]
