"""Faults that somebody who tried to break the library has found, each with the program that showed it."""
import copy
import pickle

import numpy as np
import pytest

from tinysched import GlobalCounters, Tensor, dtypes, nn


def slopes(f, *values, dtype='float32'):
    x = Tensor(list(values), dtype=dtype, requires_grad=True)
    f(x).sum().backward()
    return x.grad.numpy()


def test_log1p_and_its_family_have_slopes_everywhere():
    np.testing.assert_allclose(slopes(Tensor.log1p, 0.0, 1e-9, 1.0), [1, 1, .5])
    np.testing.assert_allclose(slopes(Tensor.softplus, 0.0, 100.0, -100.0), [.5, 1, 0], atol=1e-40)
    np.testing.assert_allclose(slopes(Tensor.logsigmoid, 0.0, 100.0, -100.0), [.5, 0, 1], atol=1e-40)
    loss = lambda x: x.binary_crossentropy_logits(Tensor([1.0, 0.0, 0.0]), reduction='sum')
    np.testing.assert_allclose(slopes(loss, 100.0, -100.0, 100.0), [0, 0, 1], atol=1e-40)


def test_log1p_of_a_large_number_is_finite():
    np.testing.assert_allclose(Tensor([1e38]).log1p().numpy(), np.log1p(np.float32([1e38])), rtol=1e-6)


def test_powers_of_zero_have_slopes():
    np.testing.assert_allclose(slopes(lambda x: x ** 2.5, 0.0, 4.0), [0, 20], rtol=1e-5)
    np.testing.assert_allclose(slopes(lambda x: x ** Tensor([1.0, 2.0, 3.0]), 0.0, 0.0, 2.0), [1, 0, 12], rtol=1e-5)
    assert (Tensor([0.0, 0.0, 0.0]) ** Tensor([2.5, -1.0, 0.0])).tolist() == [0, np.inf, 1]


@pytest.mark.parametrize('name', ['int8', 'uint8', 'int32', 'uint32', 'int64', 'uint64'])
def test_powers_of_ints_wrap(name):
    bits = np.dtype(name).itemsize * 8
    a, b = [0, 1, 2, 3, 3, 7], [64, 100, 64, 100, 127, 126]
    want = np.array([pow(x, y, 2**bits) for x, y in zip(a, b)], np.uint64).astype(name)
    for device in ('PYTHON', 'CPU'):
        x, y = Tensor(a, dtype=name, device=device), Tensor(b, dtype=name, device=device)
        np.testing.assert_array_equal((x ** y).numpy(), want)
    np.testing.assert_array_equal((Tensor(a, dtype=name) ** 100).numpy()[:4],
                                  np.array([pow(x, 100, 2**bits) for x in a[:4]], np.uint64).astype(name))


@pytest.mark.parametrize('device', ['PYTHON', 'CPU'])
def test_zero_has_no_minus(device):
    zero = Tensor([0.0, -0.0] * 4, device=device)
    assert not np.signbit(zero.abs().numpy()).any()
    for dtype in ('float32', 'float64', 'float16'):
        for n in (1, 3, 4, 8):   # a lane that is true is -1 in C
            false = Tensor(np.zeros(n, bool), device=device)
            assert not np.signbit(false.cast(dtype).numpy()).any()
            assert not np.signbit((Tensor(np.zeros(n), device=device) > 1).cast(dtype).numpy()).any()


def test_E4_reductions_read_by_overlapping_windows_are_stored():
    a = np.random.default_rng(0).standard_normal((30, 2))
    x, want = Tensor(a, device='CPU').realize(), a
    for _ in range(4): x, want = x.cumsum(0) * .1, want.cumsum(0) * .1
    before = GlobalCounters.kernel_count
    np.testing.assert_allclose(x.numpy(), want)
    assert GlobalCounters.kernel_count - before == 4   # one kernel would take 30**5 steps


@pytest.mark.parametrize('name', ['int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'int64', 'uint64'])
def test_places_may_be_small_ints(name):
    a, i = np.arange(400).reshape(20, 20), np.array([19, 0, 5], name)
    x, k = Tensor(a, device='PYTHON'), Tensor(i, device='PYTHON')
    np.testing.assert_array_equal(x[k, k].numpy(), a[i, i])
    long = Tensor.arange(300, device='PYTHON')
    np.testing.assert_array_equal(long[k].numpy(), i)
    x[k, k] = -1
    a[i, i] = -1
    np.testing.assert_array_equal(x.numpy(), a)


def test_lists_and_arrays_of_places_are_checked():
    x = Tensor.arange(12).reshape(3, 4)
    for index in ([3], [-4], (0, [0, 4]), np.array([[3]]), (slice(None), np.array([0, -5]))):
        with pytest.raises(IndexError, match='axis'): x[index]
        with pytest.raises(IndexError, match='axis'): x[index] = 0
    assert x[[]].shape == (0, 4)
    np.testing.assert_array_equal(x.numpy(), np.arange(12).reshape(3, 4))


def test_numpy_scalars_are_plain_numbers():
    x = Tensor([1.0, 4.0])
    for y in (x / np.sqrt(4), np.float64(.5) * x, x * np.array(.5), np.float32(.5) * x):
        assert y.dtype is dtypes.float32
        assert y.tolist() == [.5, 2]
    assert (x ** np.float64(2)).tolist() == [1, 16]
    assert (Tensor([3]) + np.int64(2)).tolist() == [5]
    assert (x > np.float32(2)).where(np.float32(1), np.int64(0)).tolist() == [0, 1]


def test_models_can_be_copied_and_pickled():
    model = nn.Linear(3, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.weight.requires_grad
        np.testing.assert_array_equal(other.weight.numpy(), model.weight.numpy())
        other.weight.assign(other.weight * 0)
        assert model.weight.numpy().any()
        assert not other.weight.numpy().any()
    twins = copy.deepcopy([model.bias, model.bias])
    assert twins[0] is twins[1]


@pytest.mark.parametrize('device', ['PYTHON', 'CPU'])
def test_operands_keep_their_parentheses_where_results_are_rounded(device):
    "round_f16(c ? a : b + 1) and round_f16((float)i * i) were written"
    a, b = np.arange(8, dtype='float16'), np.arange(8, dtype='float16') + 10
    x, y = Tensor(a, device=device), Tensor(b, device=device)
    kept, want = (x > 1).where(x, y), np.where(a > 1, a, b)
    np.testing.assert_array_equal((kept + 1).numpy(), want + 1)
    np.testing.assert_array_equal((y - kept).numpy(), b - want)
    i = np.array([1 << 16, 3, -5, 7], 'int32')
    n = Tensor(i, device=device)
    for dtype in (dtypes.float16, dtypes.bfloat16):
        np.testing.assert_array_equal((n * n).cast(dtype).numpy(), [0, 9, 25, 49])
        np.testing.assert_array_equal((n ^ 5).cast(dtype).numpy(), Tensor(i ^ 5, device=device).cast(dtype).numpy())


@pytest.mark.parametrize('name', ['int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'int64', 'uint64'])
def test_shifts_drop_the_bits_that_leave_the_type(name):
    info = np.iinfo(name)
    a = np.array([info.max, info.min, 77], name)
    for n in (1, info.bits - 1):
        want = a << np.array(n, name)
        shifted = Tensor(a, device='CPU') << n
        np.testing.assert_array_equal(shifted.cast(dtypes.float64).numpy(), want.astype('float64'))
        np.testing.assert_array_equal((shifted >> n).numpy(), want >> np.array(n, name))


def test_matmul_takes_any_name_of_a_dtype():
    x = Tensor([[100, 1]], dtype='int8')
    for dtype in ('int32', np.int32, int, dtypes.int32):
        assert x.matmul(x.T, dtype=dtype).tolist() == [[10001]]
