import pytest
import torch

from vocab import choose


def test_offsets_ties_and_special_tokens():
    counts = torch.tensor([0, 5, 5, 9, 0, 5, 0, 1])
    d2t, t2d = choose(counts, [6], 4)
    ids = torch.arange(4) + d2t
    # 6 is special, 3 is most frequent, 1 and 2 win the tie with 5 by their ids
    assert ids.tolist() == [1, 2, 3, 6]
    assert t2d.nonzero().flatten().tolist() == ids.tolist()
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool


def test_fewer_distinct_tokens_than_the_size_are_filled_from_the_lowest_ids():
    d2t, t2d = choose(torch.tensor([0, 0, 0, 7, 0]), [4], 4)
    assert (torch.arange(4) + d2t).tolist() == [0, 1, 3, 4]
    assert int(t2d.sum()) == 4


@pytest.mark.parametrize("size", [1, 6])
def test_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match="draft_vocab_size"):
        choose(torch.zeros(5, dtype=torch.int64), [3, 4], size)
