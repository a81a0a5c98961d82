"Indexing costs what it touches (E12): operations and bytes grow with the sizes, not with their product"
import numpy as np
import pytest

from tinysched import GlobalCounters, Tensor, dtypes

rng = np.random.default_rng(0)


def floats(*shape): return rng.standard_normal(shape).astype(np.float32)
def ints(n, *shape): return rng.integers(0, n, shape).astype(np.int32)


def run(f, *arrays):
    "Result, operations and bytes of a function of realized tensors"
    tensors = [Tensor(a).realize() for a in arrays]
    GlobalCounters.reset()
    out = f(*tensors).realize()
    return out.numpy(), GlobalCounters.global_ops, GlobalCounters.global_mem


def linear(make, reference, n=64, tol=0.0):
    "None; AssertionError unless results are right and doubling n at most doubles the cost"
    costs = []
    for k in (n, 2 * n, 4 * n):
        f, *arrays = make(k)
        got, ops, mem = run(f, *arrays)
        np.testing.assert_allclose(got, reference(*arrays), rtol=tol, atol=tol)
        costs.append((ops, mem))
    for (a, m), (b, o) in zip(costs, costs[1:]):
        assert b <= 2.2 * a + 64 and o <= 2.2 * m + 64, costs
    return costs


def place(n): return Tensor.arange(n)


def test_E12_embedding_is_a_load():
    "Tokens times dimensions, whatever the vocabulary"
    costs = linear(lambda n: (lambda w, i: w[i], floats(n, 8), ints(n, n)), lambda w, i: w[i])
    assert costs[0][0] <= 8 * 64
    _, few, _ = run(lambda w, i: w[i], floats(4000, 8), ints(4000, 64))
    assert few == costs[0][0]


def test_E12_embedding_written_by_hand():
    def by_hand(w, i):
        n, d = w.shape
        return (place(n).reshape(1, n, 1) == i.reshape(-1, 1, 1)).where(w.reshape(1, n, d), 0).sum(1)
    linear(lambda n: (by_hand, floats(n, 8), ints(n, n)), lambda w, i: w[i])


def test_E12_mask_with_an_offset_and_a_step():
    def odd(w, i):
        n, = w.shape
        return (place(n).reshape(1, n) * 3 - 5 == i.reshape(-1, 1)).where(w.reshape(1, n), 0).sum(1)
    want = lambda w, i: np.array([w[(k + 5) // 3] if (k + 5) % 3 == 0 else 0 for k in i], w.dtype)
    linear(lambda n: (odd, floats(n), ints(3 * n - 5, n)), want)


@pytest.mark.parametrize('index', ['rows', 'columns', 'both', 'grid', 'mixed'])
def test_E12_getitem(index):
    at = dict(rows=lambda i: i, columns=lambda i: (slice(None), i % 16), both=lambda i: (i, i % 16),
              grid=lambda i: (i.reshape(-1, 1), i[:4] % 16), mixed=lambda i: (slice(1, None, 2), i % 16))[index]
    ratio = lambda n: (lambda w, i: w[at(i)], floats(n, 16), ints(n, 16 if index in ('mixed', 'columns') else n))
    linear(ratio, lambda w, i: w[at(i)])


def test_E12_gather():
    make = lambda n: (lambda w, i: w.gather(0, i), floats(n, 8), ints(n, n, 8))
    linear(make, lambda w, i: np.take_along_axis(w, i.astype(np.int64), 0))


def test_E12_index_of_an_index():
    linear(lambda n: (lambda w, i: w[i[i]], floats(n, 8), ints(n, n)), lambda w, i: w[i[i]])


def test_E12_embedding_of_what_is_computed():
    "Rows are computed only where they are fetched"
    make = lambda n: (lambda w, i: (w * 2 + 1).relu()[i], floats(n, 8), ints(n, 64))
    costs = linear(make, lambda w, i: np.maximum(w * 2 + 1, 0)[i], tol=1e-6)
    assert costs[0][0] == costs[2][0]


def test_E12_setitem():
    def put(w, i, v):
        w = w.clone()
        w[i] = v
        return w
    def want(w, i, v):
        w = w.copy()
        w[i] = v
        return w
    linear(lambda n: (put, floats(n, 8), ints(n, n), floats(n, 8)), want)


def test_E12_setitem_last_write_wins_and_unknown_places_are_nobodys():
    x = Tensor(np.zeros((20, 2), np.float32))
    x[Tensor(np.int32([3, 3, -1, 20, -21]))] = Tensor(np.arange(10, dtype=np.float32).reshape(5, 2))
    want = np.zeros((20, 2), np.float32)
    want[3], want[-1] = (2, 3), (4, 5)
    np.testing.assert_array_equal(x.numpy(), want)


def test_E12_gradient_of_an_embedding():
    "Each token adds to one row; rows without tokens are only filled with zeros"
    def slope(w, i, g): return (w[i] * g).sum().gradient(w)[0]
    def want(w, i, g):
        out = np.zeros_like(w)
        np.add.at(out, i, g)
        return out
    linear(lambda n: (slope, floats(n, 8), ints(n, n), floats(n, 8)), want, tol=1e-5)


def test_E12_counting_words():
    make = lambda n: (lambda i: (i.reshape(1, -1) == place(n).reshape(-1, 1)).sum(1), ints(n, n))
    linear(make, lambda i: np.bincount(i, minlength=len(i)))


def test_E12_one_hot_rows_times_weights():
    make = lambda n: (lambda w, i: i.one_hot(n).float() @ w, floats(n, 8), ints(n, n))
    linear(make, lambda w, i: w[i])


def test_E12_one_hot_columns_times_values():
    def want(w, i):
        out = np.zeros_like(w)
        np.add.at(out, i, w)
        return out
    linear(lambda n: (lambda w, i: i.one_hot(n).float().T @ w, floats(n, 8), ints(n, n)), want, tol=1e-5)


@pytest.mark.parametrize('bad', [np.inf, -np.inf, np.nan])
def test_E12_a_product_keeps_what_zero_times_infinity_is(bad):
    "A row that does not choose the infinite weight gets 0 * inf, which is nan; one that does gets it"
    w, i = floats(40, 3), np.int32([2, 5, 2, 7])
    w[5, 1] = bad
    with np.errstate(invalid='ignore'): want = (np.eye(40, dtype=np.float32)[i][:, :, None] * w).sum(1)
    np.testing.assert_array_equal((Tensor(i).one_hot(40).float() @ Tensor(w)).numpy(), want)
    np.testing.assert_array_equal(Tensor(w)[Tensor(i)].numpy(), w[i])    # brackets choose


def test_E12_identity_matrix():
    linear(lambda n: (lambda w: Tensor.eye(n) @ w, floats(n, 8)), lambda w: w)


@pytest.mark.parametrize('compare', ['lt', 'le', 'gt', 'ge', 'eq', 'ne'])
def test_E12_counting_by_comparison_needs_no_loop(compare):
    ops = dict(lt=lambda a, b: a < b, le=lambda a, b: a <= b, gt=lambda a, b: a > b,
               ge=lambda a, b: a >= b, eq=lambda a, b: a == b, ne=lambda a, b: a != b)
    table = lambda k: ops[compare](k(len_).reshape(1, -1) * 2 - 3, k(len_).reshape(-1, 1)).sum(1)
    for len_ in (5, 64, 256):
        got, ops_, _ = run(lambda z: table(place) + z * 0, np.zeros(len_, np.int32))
        np.testing.assert_array_equal(got, table(np.arange))
        assert ops_ <= 40 * len_


def test_E12_counting_against_memory():
    make = lambda n: (lambda k: (place(n).reshape(1, n) < k.reshape(-1, 1)).sum(1), ints(3 * n, n) - n)
    linear(make, lambda k: np.clip(k, 0, len(k)))


def test_E12_cumulative_sums():
    costs = linear(lambda n: (lambda x: x.cumsum(0), ints(9, n)), np.cumsum, n=2048)
    assert costs[2][0] <= 40 * 8192
    for shape, axis in (((3, 100, 2), 1), ((70, 3), 0), ((2, 33), -1)):
        x = ints(9, *shape)
        np.testing.assert_array_equal(Tensor(x).cumsum(axis).numpy(), np.cumsum(x, axis))


@pytest.mark.parametrize('name', ['triu', 'tril'])
def test_E12_triangles(name):
    linear(lambda n: (lambda x: getattr(x, name)(), floats(n, 16)), getattr(np, name))


def test_E12_labels():
    def want(x, y):
        e = x - x.max(1, keepdims=True)
        return -(e - np.log(np.exp(e).sum(1, keepdims=True)))[np.arange(len(y)), y].mean()
    linear(lambda n: (lambda x, y: x.cross_entropy(y), floats(n, 10), ints(10, n)), want, tol=1e-5)


def test_E12_arange_needs_no_memory():
    _, ops, mem = run(lambda z: place(1000) * 3 + 1 + z * 0, np.zeros(1000, np.int32))
    assert ops <= 4000 and mem == 4000


@pytest.mark.parametrize('dtype', ['int8', 'int16', 'int64', 'uint8', 'uint32', 'uint64'])
def test_E12_places_outside_are_read_nowhere(dtype):
    "PYTHON raises for an index outside of a buffer; the sum over no match is 0"
    least = 0 if dtype[0] == 'u' else -25
    i = np.arange(least, 30).astype(dtype)
    w = floats(20, 3)
    j = np.where(i < 0, i.astype(np.int64) + 20, i.astype(np.int64))
    want = np.where(((j >= 0) & (j < 20))[:, None], w[np.clip(j, 0, 19)], 0)
    np.testing.assert_array_equal(Tensor(w)[Tensor(i)].numpy(), want)
    far = np.iinfo(dtype).max - np.arange(3).astype(dtype)
    np.testing.assert_array_equal(Tensor(w)[Tensor(far)].numpy(), 0 * w[:3])


def test_E12_a_column_that_is_missing_is_not_in_the_next_row():
    w = floats(4, 3)
    i, j = np.int32([0, 0, -5, 3, 4]), np.int32([2, 3, 0, -4, 0])
    np.testing.assert_array_equal(Tensor(w)[Tensor(i), Tensor(j)].numpy(), [w[0, 2], 0, 0, 0, 0])
    x = Tensor(w)
    x[Tensor(i), Tensor(j)] = 9
    w[0, 2] = 9
    np.testing.assert_array_equal(x.numpy(), w)


def test_E12_an_ellipsis_for_nothing_still_stands_between():
    x, i, j = floats(2, 3, 4), np.int32([0, 2]), np.int32([1, 3])
    at = lambda k: ((slice(None), k(i), ..., k(j)), (0, ..., k(j)), (..., k(i), k(j)), (0, ..., k(i), k(j)))
    for ours, theirs in zip(at(Tensor), at(np.array)):
        np.testing.assert_array_equal(Tensor(x)[ours].numpy(), x[theirs])


def test_E12_numbers_that_wrap_are_not_solved():
    "The mask of an int8 that wraps round holds at several places"
    i, w = np.int8([0, 44, -1]), ints(9, 600)
    hit = lambda k, n, dt: (k.cast(dt) if dt else k.astype(np.int8)).reshape(1, -1)
    got = (hit(place(600), 600, dtypes.int8) == Tensor(i).reshape(-1, 1)).where(Tensor(w), 0).sum(1)
    want = np.where(hit(np.arange(600), 600, None) == i.reshape(-1, 1), w, 0).sum(1)
    np.testing.assert_array_equal(got.numpy(), want)


def random_mask(seed):
    "A mask of comparisons of two counts, the same for tinysched and NumPy, and what it chooses from"
    r = np.random.default_rng(seed)
    n, m, d = (int(k) for k in r.integers(1, 20, 3))
    a, b, c, e = (int(k) for k in r.integers(-3, 4, 4))
    names = r.choice(['lt', 'eq', 'ne', 'ge'], int(r.integers(1, 3)))
    ops = dict(lt=lambda x, y: x < y, eq=lambda x, y: x == y, ne=lambda x, y: x != y, ge=lambda x, y: x >= y)
    k = r.integers(-5, 25, m).astype(r.choice(['int8', 'int32', 'int64', 'uint8']))
    w = r.integers(-9, 9, (n, d)).astype(np.int32)
    def value(count, k, w, where, reduce):
        x, y = count(n).reshape(1, n, 1) * a + b, k.reshape(m, 1, 1) * c + e
        hit = ops[names[0]](x, y)
        for name in names[1:]: hit = hit & ops[name](x, count(m).reshape(m, 1, 1))
        return reduce(where(hit, w.reshape(1, n, d)))
    return n, k, w, value, int(r.integers(0, 2)), r.choice(['sum', 'max'])


@pytest.mark.parametrize('seed', range(60))
def test_E12_random_masks(seed):
    n, k, w, value, axis, how = random_mask(seed)
    ours = value(place, Tensor(k).cast('int32'), Tensor(w), lambda c, x: c.where(x, 0),
                 lambda x: getattr(x, how)(axis))
    want = value(np.arange, k.astype(np.int32), w, lambda c, x: np.where(c, x, 0),
                 lambda x: getattr(x, how)(axis))
    np.testing.assert_array_equal(ours.numpy(), want)


# ---------------------------------------------------------------- masks as indices

def same(t, a): np.testing.assert_array_equal(t.numpy(), a)


@pytest.mark.parametrize('seed', range(25))
def test_setitem_by_a_mask_as_numpy_has_it(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(0 if seed % 7 == 0 else 1, 5, rng.integers(0, 4)))
    a = rng.integers(-9, 9, shape).astype(rng.choice(['float32', 'int32']))
    lead = int(rng.integers(0, a.ndim + 1))
    mask, rest = np.asarray(rng.random(shape[:lead]) < 0.5), shape[lead:]
    value = rng.integers(-9, 9, tuple(int(rng.choice([1, n])) for n in rest)).astype(a.dtype) if seed % 3 else 7
    t = Tensor(a).contiguous().realize() if seed % 2 else Tensor(a)
    view, old = t.reshape(-1), t + 0
    before = a.copy()
    t[Tensor(mask) if seed % 5 else mask] = Tensor(value) if seed % 4 and seed % 3 else value
    a[mask] = value
    same(t, a); same(old, before); same(view, a.reshape(-1))


def test_setitem_by_a_mask_writes_through_views_and_in_lists():
    t = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)).contiguous().realize()
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    t[:, ::2][t[:, ::2] > 3] = -1; a[:, ::2][a[:, ::2] > 3] = -1
    t[[True, False, True]] = Tensor([1., 2, 3, 4]); a[[True, False, True]] = [1, 2, 3, 4]
    t[t == 3] = 2.5; a[a == 3] = 2.5
    same(t, a)


@pytest.mark.parametrize('index, value, error, message', [
    (np.array([True]), 1, IndexError, r'mask of shape \(1,\) for shape \(2, 3\); wanted its first axes'),
    (np.ones((2, 3, 1), bool), 1, IndexError, 'wanted its first axes'),
    (np.ones((2, 3), bool), [1., 2, 3], ValueError, r'How many elements .* not known yet.* x\.assign\(mask\.where'),
    (np.ones(2, bool), np.ones((2, 3), np.float32), ValueError, 'not known yet'),
    ((slice(None), np.ones(3, bool)), 1, IndexError, r'not known yet: try mask\.where\(x, 0\)')])
def test_setitem_by_a_mask_that_cannot_be_says_what_can(index, value, error, message):
    t = Tensor.zeros(2, 3).contiguous()
    with pytest.raises(error, match=message): t[index] = value
    with pytest.raises(IndexError, match=r'not known yet: try mask\.where\(x, 0\)'): t[t == 0]
    same(t, np.zeros((2, 3), np.float32))
