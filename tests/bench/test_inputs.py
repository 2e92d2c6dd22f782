"""The ids that a measurement draws are as their distribution says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dsa_planner.bench import inputs, request  # noqa: E402
from dsa_planner.bench.request import IDS, Shape  # noqa: E402


def draw(ids: str, batch: int = 2, s_q: int = 40, s_k: int = 300, topk: int = 128, seed: int = 0) -> torch.Tensor:
    found = inputs.draw_ids(Shape(batch, s_q, s_k, topk, ids), torch.Generator().manual_seed(seed), "cpu")
    assert (found.shape, found.dtype, found.is_contiguous()) == ((batch, s_q, topk), torch.int32, True)
    return found


@pytest.mark.parametrize("s_k", [128, 129, 300, 5000])
@pytest.mark.parametrize("ids", IDS)
def test_the_keys_of_a_row_are_distinct_and_there(ids: str, s_k: int) -> None:
    found = draw(ids, s_k=s_k)
    assert int(found.min()) >= 0
    assert int(found.max()) < s_k
    in_order = found.sort(-1).values
    assert (in_order[..., 1:] > in_order[..., :-1]).all()


@pytest.mark.parametrize("ids", sorted(set(IDS) - {"window"}))
def test_a_seed_decides(ids: str) -> None:
    assert torch.equal(draw(ids), draw(ids))
    assert not torch.equal(draw(ids), draw(ids, seed=1))


def test_chunks_of_any_size_fill_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for random numbers is bounded, so rows are drawn in chunks; the last one is smaller."""
    monkeypatch.setattr(inputs, "_CHUNK", 300 * 7)
    for ids in IDS:
        in_order = draw(ids).sort(-1).values
        assert (in_order[..., 1:] > in_order[..., :-1]).all()
    monkeypatch.setattr(inputs, "_CHUNK", 1)
    draw("uniform")


def test_uniform_is_even_over_keys_and_over_slots() -> None:
    found = draw("uniform", batch=1, s_q=2000, s_k=256)
    counts = torch.bincount(found.flatten(), minlength=256)
    assert counts.float().std() < 40  # 1000 each, with a deviation of 22
    assert abs(float(found.float().mean(1).std())) < 10, "no slot prefers small or large keys"
    assert abs(float(found[0, :, 0].float().mean()) - 127.5) < 10


def test_sorted_is_uniform_in_ascending_order() -> None:
    assert torch.equal(draw("sorted"), draw("uniform").sort(-1).values)


def test_window_is_the_keys_before_the_query() -> None:
    found = draw("window", s_q=50, s_k=500)
    for query in (0, 1, 49):
        assert set(found[1, query].tolist()) == {(query * 10 - back) % 500 for back in range(128)}


def test_shared_is_80_percent_of_a_group_of_16_and_no_more_than_chance_of_others() -> None:
    rows = [set(row.tolist()) for row in draw("shared", s_q=40, s_k=4000).reshape(80, 128)]
    for group in (range(16), range(16, 32), range(32, 40), range(40, 56)):  # S_q is no multiple of 16
        common = set.intersection(*(rows[row] for row in group))
        assert round(0.8 * 128) <= len(common) <= 104
    assert len(rows[15] & rows[16]) < 20
    assert len(rows[39] & rows[40]) < 20, "the first group of a batch element is one of its own"


@pytest.mark.parametrize(("topk", "sinks"), [(128, 16), (2048, 128)])
def test_sinks_are_in_every_row_and_the_rest_is_even(topk: int, sinks: int) -> None:
    found = draw("sinks", s_k=5000, topk=topk)
    rows = [set(row.tolist()) for row in found.reshape(80, topk)]
    assert set.intersection(*rows) >= set(range(sinks))
    assert len(set.intersection(*rows)) < sinks + 3
    assert (found[0, :, 0] < sinks).float().mean() < 0.5, "sinks have no slots of their own"


def test_a_section_has_a_fresh_attn_score_for_each_call() -> None:
    wanted = request.parse({"topk": "128", "s_q": "4", "s_k": "200", "d_index_k": "fp32"})
    made = inputs.make(wanted.shapes[0], wanted, "cpu")
    assert made.calls == inputs.CALLS
    assert len({made.arguments(number)[3].data_ptr() for number in range(made.calls)}) == made.calls
    made.arguments(3)[3].zero_()
    made.restore()
    assert torch.equal(made.arguments(3)[3], made.attn_score)
    assert made.d_index_k.dtype == torch.float32
    assert made.d_weights.dtype == torch.bfloat16
    torch.testing.assert_close(made.attn_score.sum(-1), torch.ones(1, 4))


def test_fewer_calls_where_scores_are_large_and_an_estimate_that_covers_the_tensors() -> None:
    assert inputs._calls(Shape(1, 8192, 4096, 2048, "uniform")) == inputs.CALLS
    assert inputs._calls(Shape(1, 1 << 20, 4096, 2048, "uniform")) == 2
    wanted = request.parse({"topk": "128", "s_q": "64", "s_k": "200"})
    made = inputs.make(wanted.shapes[0], wanted, "cpu")
    tensors = [value for value in vars(made).values() if isinstance(value, torch.Tensor)] + list(made.copies)
    assert sum(tensor.nbytes for tensor in tensors) < inputs.bytes_of(wanted.shapes[0], 64)
