import pytest
import torch

from pl_grouprl.distributed.checksum import WeightsMismatchError, add, buckets, check_weights, checksum

GOLDEN = 0x9E3779B97F4A7C15


def signed(value):
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def random_weight(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_checksum_by_hand():
    # float32 1.0 is 0x3F800000 and 2.0 is 0x40000000; columns count 1, 3, 5.
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]])
    one, two = 0x3F800000, 0x40000000
    assert checksum(weight) == signed(GOLDEN * (1 * one + 3 * (two + one) + 5 * two))
    assert checksum(torch.tensor([1.0, 2.0])) == signed(GOLDEN * (one + two))  # a vector has rows of one column
    assert checksum(torch.tensor([-0.0, 1.0])) == checksum(torch.tensor([0.0, 1.0]))  # zeros have no sign


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_fused_rows_and_shards_add_up(dtype):
    query, key = random_weight(8, 6, seed=1).mul(9).to(dtype), random_weight(4, 6, seed=2).mul(9).to(dtype)
    whole = add(checksum(query), checksum(key))
    assert checksum(torch.cat([query, key])) == whole
    assert checksum(torch.cat([key, query, torch.zeros(3, 6, dtype=dtype)])) == whole  # padding
    ranks = [torch.cat([query[:4], key[:2]]), torch.cat([query[4:], key[2:]])]
    assert add(*map(checksum, ranks)) == whole
    columns = [checksum(query[:, :2]), checksum(query[:, 2:], first_column=2)]
    assert add(*columns) == checksum(query)


def test_large_weights_are_added_up_in_chunks():
    weight = random_weight(3000, 3000, dtype=torch.bfloat16)
    assert checksum(weight) == add(*(checksum(part) for part in weight.split(7)))


def test_experts_and_convolutions():
    experts = random_weight(3, 4, 5)
    assert checksum(experts) == add(*map(checksum, experts))
    kernel = random_weight(3, 4, 2, 2)
    assert checksum(kernel) == checksum(kernel.reshape(3, 16))


@pytest.mark.parametrize("bit", range(16))
def test_every_bit_counts(bit):
    weight = random_weight(5, 7, dtype=torch.bfloat16)
    flipped = weight.clone()
    flipped.view(torch.int16)[3, 4] ^= 1 << bit if bit < 15 else -(2**15)
    assert checksum(flipped) != checksum(weight)


def test_columns_do_not_commute():
    weight = random_weight(4, 4)
    assert checksum(weight.flip(1)) != checksum(weight)
    assert checksum(weight.flip(0)) == checksum(weight)  # as the order of fused rows does not count


def test_buckets():
    weights = [(name, torch.zeros(count)) for name, count in [("a", 2), ("b", 3), ("c", 9), ("d", 1), ("e", 1)]]
    cut = [[name for name, _ in bucket] for bucket in buckets(iter(weights), max_bytes=20)]
    assert cut == [["a", "b"], ["c"], ["d", "e"]]  # c has 36 bytes
    assert list(buckets([], 20)) == []
    read = iter(weights)
    next(buckets(read, max_bytes=20))
    assert next(read)[0] == "d"  # it has read one weight ahead


SENT = {"q": 5, "k": 7, "norm": 11, "embed": 2**63 - 1}


def workers():
    """Two workers: q and k fused and split by rows, a norm on each, and the embedding split."""
    first = [["qkv", ["q", "k"], 4, "sum"], ["norm", ["norm"], 11, "copy"], ["embed", ["embed"], 2**63 - 2, "sum"]]
    second = [["qkv", ["q", "k"], 8, "sum"], ["norm", ["norm"], 11, "copy"], ["embed", ["embed"], 1, "sum"]]
    return [first, second]


def test_equal_weights_pass():
    check_weights(SENT, workers())
    check_weights({"a": 1}, [[["x", ["a"], 1, "copy"], ["y", ["a"], 1, "sum"]]])  # tied, and kept twice
    check_weights({"e.0": 1, "e.1": 2}, [[["e", ["e.0"], 1, "sum"]], [["e", ["e.1"], 2, "sum"]]])  # experts apart
    check_weights({"a": 2**63 - 1, "b": 1}, [[["ab", ["a", "b"], -(2**63), "sum"]]])  # modulo 2^64


@pytest.mark.parametrize(
    ("worker", "row", "value", "message"),
    [
        (0, 0, ["qkv", ["q", "k"], 5, "sum"], r"1 differ: qkv .* q \+ k"),
        (1, 1, ["norm", ["norm"], 12, "copy"], "norm differs"),
        (1, 1, ["norm", ["norm"], 0, "sum"], "norm is stored in different ways"),
        (0, 2, ["embed", [], 2**63 - 2, "sum"], "embed was not sent"),
        (0, 0, ["qkv", ["q", "v"], 4, "sum"], "v, which was not sent"),
    ],
)
def test_a_difference_is_named(worker, row, value, message):
    loaded = workers()
    loaded[worker][row] = value
    with pytest.raises(WeightsMismatchError, match=message):
        check_weights(SENT, loaded)


def test_an_unloaded_weight_is_named_and_only_some_of_many():
    loaded = [[weight for weight in worker if weight[0] != "norm"] for worker in workers()]
    with pytest.raises(WeightsMismatchError, match="norm was sent"):
        check_weights(SENT, loaded)
    with pytest.raises(WeightsMismatchError, match="4 differ"):
        check_weights(SENT, [])
    sent = {f"w{index}": index for index in range(9)}
    with pytest.raises(WeightsMismatchError, match=r"9 differ: w0 .*; w4 [^;]*; \.\.\.") as error:
        check_weights(sent, [[[name, [name], value + 1, "copy"] for name, value in sent.items()]])
    assert "w5" not in str(error.value)
