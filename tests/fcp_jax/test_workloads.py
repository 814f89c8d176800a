import numpy as np
import pytest

from fcp_jax.workloads import MAX_LENGTH, WORKLOADS, sample_seqlens

BATCH = dict(num_ranks=64, tokens_per_rank=32768)


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches_are_full_seeded_and_within_bounds(name):
    lengths = sample_seqlens(name, **BATCH, seed=3)
    assert lengths.dtype == np.int64 and lengths.sum() == 64 * 32768
    assert lengths.min() >= 1 and lengths.max() <= MAX_LENGTH
    np.testing.assert_array_equal(lengths, sample_seqlens(name, **BATCH, seed=3))
    assert not np.array_equal(lengths, sample_seqlens(name, **BATCH, seed=4))


def test_shapes_of_the_distributions():
    big = {name: sample_seqlens(name, num_ranks=1024, tokens_per_rank=32768) for name in WORKLOADS}
    assert 2500 < np.median(big["lognormal"]) < 3700
    assert 3500 < np.median(big["weak_tail"]) < 4700
    assert big["lognormal"].max() > 4 * big["weak_tail"].max()
    assert 0.85 < np.mean(big["bimodal"] < 16384) < 0.95
    assert 28000 < big["uniform"].mean() < 37000


def test_a_length_a_line(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("7\n11\n")
    lengths = sample_seqlens(str(path), num_ranks=2, tokens_per_rank=100)
    assert set(lengths[:-1].tolist()) == {7, 11} and lengths.sum() == 200


def test_a_histogram(tmp_path):
    path = tmp_path / "histogram.csv"
    path.write_text('range,number,percentage\n"[10, 12]",900,90\n"[500, 600]",100,10\n')
    lengths = sample_seqlens(str(path), num_ranks=8, tokens_per_rank=4096)[:-1]
    short = (lengths >= 10) & (lengths <= 12)
    assert np.all(short | ((lengths >= 500) & (lengths <= 600)))
    assert 0.85 < short.mean() < 0.95


def test_bad_workloads(tmp_path):
    with pytest.raises(ValueError, match="workload must be one of lognormal"):
        sample_seqlens("nope", **BATCH)
    path = tmp_path / "words.txt"
    path.write_text("seven\n")
    with pytest.raises(ValueError, match="must hold one length a line"):
        sample_seqlens(str(path), **BATCH)
