"""Element types: against NumPy's casts, and the laws of the lattice."""
import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tinysched.ir.dtype import (DType, as_const, can_lossless_cast, dtypes, from_numpy, from_py, from_storage,
                                least_upper_dtype, sum_acc_dtype, to_dtype, to_numpy, to_storage)

INTS, FLOATS = st.sampled_from(dtypes.ints), st.sampled_from([dtypes.float16, dtypes.float32, dtypes.float64])
any_dtype = st.sampled_from(dtypes.all)

@given(st.integers(-2**63, 2**63 - 1), INTS)
def test_integers_wrap_as_in_numpy(n, dt):
    assert as_const(n, dt) == int(np.int64(n).astype(to_numpy(dt)))

@given(st.floats(), FLOATS)
def test_floats_round_as_in_numpy(v, dt):
    with np.errstate(over='ignore'): want = float(np.float64(v).astype(to_numpy(dt)))
    got = as_const(v, dt)
    assert repr(got) == repr(want) and isinstance(got, float)

@given(st.floats(width=32))
def test_bfloat16_one_and_many_agree(v):
    many = from_storage(to_storage(np.array([v], np.float32), dtypes.bfloat16), dtypes.bfloat16)
    assert repr(float(many[0])) == repr(as_const(v, dtypes.bfloat16))

@given(st.integers(0, 2**16 - 1))
def test_bfloat16_storage_is_kept(bits):
    raw = np.array(bits, np.uint16)
    value = from_storage(raw, dtypes.bfloat16)
    if not np.isnan(value): assert to_storage(value, dtypes.bfloat16) == raw
    else: assert np.isnan(from_storage(to_storage(value, dtypes.bfloat16), dtypes.bfloat16))

@given(st.floats(min_value=-2.0**126, max_value=2.0**126, width=32))
def test_bfloat16_is_nearest(v):
    got = as_const(v, dtypes.bfloat16)
    bits = int(to_storage(np.float32(v), dtypes.bfloat16))
    near = [float(from_storage(np.array(b, np.uint16), dtypes.bfloat16)) for b in (bits - 1, bits + 1) if 0 <= b < 2**16]
    assert all(abs(got - v) <= abs(n - v) for n in near if math.isfinite(n))

@given(any_dtype, any_dtype)
def test_meeting_is_above_both(a, b):
    m = least_upper_dtype(a, b)
    assert m is least_upper_dtype(b, a) and least_upper_dtype(m, a) is m is least_upper_dtype(m, b)
    if m.kind != 'float' or a.kind == b.kind == 'float': assert can_lossless_cast(a, m) and can_lossless_cast(b, m)

@given(INTS, st.data())
def test_lossless_casts_lose_nothing(a, data):
    b = data.draw(any_dtype)
    n = data.draw(st.integers(a.min, a.max))
    if can_lossless_cast(a, b): assert as_const(as_const(n, b), a) == n == as_const(n, b)

@pytest.mark.parametrize('dt', dtypes.all)
def test_a_type_is_one_object(dt):
    assert copy.deepcopy(dt) is copy.copy(dt) is pickle.loads(pickle.dumps(dt)) is to_dtype(dt.name) is to_dtype(dt)
    assert DType(dt.priority, dt.itemsize, dt.name, dt.kind) is dt
    assert dt.itemsize == (2 if dt is dtypes.bfloat16 else to_numpy(dt).itemsize)
    with pytest.raises(AttributeError): dt.name = 'other'

def test_sums_as_documented():
    want = dict(bool='int32', int8='int32', int64='int64', uint16='uint32', uint64='uint64', float16='float32',
                bfloat16='float32', float64='float64')
    assert {k: sum_acc_dtype(to_dtype(k)).name for k in want} == want

def test_defaults_can_be_changed():
    try:
        dtypes.default_float, dtypes.default_int = dtypes.float64, dtypes.int64
        assert (from_py(1.0), from_py(1), least_upper_dtype(dtypes.int64, dtypes.uint64)) == (
            dtypes.float64, dtypes.int64, dtypes.float64)
    finally: dtypes.default_float, dtypes.default_int = dtypes.float32, dtypes.int32

@pytest.mark.parametrize('bad', ['flaot', '', 'void0', 3, None, np.complex64, object, 'U4'])
def test_no_such_type(bad):
    with pytest.raises(TypeError): to_dtype(bad)

@pytest.mark.parametrize('value, want', [(True, 'bool'), (np.int8(1), 'int8'), ([1, 2.5], 'float32'), ([[True], [2]], 'int32'),
                                         (2**40, 'int64'), (-2**31 - 1, 'int64'), ((), 'float32')])
def test_types_of_values(value, want): assert from_py(value).name == want

@pytest.mark.parametrize('name', ['<i4', '>f8', 'bool', 'half', 'int64'])
def test_from_numpy(name): assert from_numpy(name).name == np.dtype(name).name

@pytest.mark.parametrize('bad', ['1', None, 1j, [1]])
def test_no_constant(bad):
    with pytest.raises(TypeError): as_const(bad, dtypes.float32)


def test_numbers_that_fit_nowhere():
    assert [dtypes.is_bool(t) for t in (dtypes.bool, dtypes.uint8)] == [True, False]
    assert dtypes.as_const(3.7, dtypes.int32) == 3 and dtypes.as_const(10**400, dtypes.float32) == math.inf
    with pytest.raises(OverflowError, match='does not fit in 64 bits'): from_py(2**64)
    with pytest.raises(TypeError, match='has no element type'): from_py(object())
