"""Shapes with variables in them: one schedule and one compilation serve every length (E11, B4, G1, I1 to I5)."""
import os
import numpy as np
import pytest
from tinysched import Tensor, Variable, run_linear, sched_stats, schedule_cache
from tinysched.ir.dtype import dtypes
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import realize as runtime

rng = np.random.default_rng(0)
R = rng.standard_normal((8, 4)).astype(np.float32)

def work():
    "How many schedules and kernels were made so far"
    return schedule_cache.misses, sum(map(len, runtime.programs.values()))

def same(got, want):
    got, want = got.numpy(), np.asarray(want)
    assert got.shape == want.shape, f'{got.shape} != {want.shape}'
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

def softmax(a, axis=-1):
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)

x, w = Tensor(R).realize(), Tensor(R[:4].T.copy()).realize()
OPERATIONS = {
    'elementwise': (lambda n: x[:n] * 2 + 1, lambda k: R[:k] * 2 + 1),
    'view': (lambda n: x[:n], lambda k: R[:k]),
    'columns': (lambda n: x.T[:, :n].contiguous(), lambda k: R.T[:, :k]),
    'sum over it': (lambda n: x[:n].sum(0), lambda k: R[:k].sum(0)),
    'sum beside it': (lambda n: x[:n].sum(1), lambda k: R[:k].sum(1)),
    'max': (lambda n: (x[:n] - 5).max(), lambda k: (R[:k] - 5).max()),
    'matmul': (lambda n: x[:n] @ w, lambda k: R[:k] @ R[:4].T),
    'matmul inside': (lambda n: x[:n].T @ x[:n], lambda k: R[:k].T @ R[:k]),
    'matmul outside': (lambda n: x[:n] @ x[:n].T, lambda k: R[:k] @ R[:k].T),
    'softmax': (lambda n: (x[:n] @ x[:n].T).softmax(), lambda k: softmax(R[:k] @ R[:k].T)),
    'softmax over rows': (lambda n: x[:n].softmax(0), lambda k: softmax(R[:k], 0)),
    'mean': (lambda n: x[:n].mean(0), lambda k: R[:k].mean(0)),
    'var': (lambda n: x[:n].var(0, correction=0), lambda k: R[:k].var(0)),
    'pad': (lambda n: x[:n].pad(((1, 2), (0, 1))), lambda k: np.pad(R[:k], ((1, 2), (0, 1)))),
    'sum of padded': (lambda n: x[:n].exp().pad(((1, 2), (0, 1))).sum(1),
                      lambda k: np.pad(np.exp(R[:k]), ((1, 2), (0, 1))).sum(1)),
    'start': (lambda n: x[n - 1:] + 1, lambda k: R[k - 1:] + 1),
    'start and end': (lambda n: x[n - 1:n] + 1, lambda k: R[k - 1:k] + 1),
    'half': (lambda n: x[:(n + 1) // 2] + 1, lambda k: R[:(k + 1) // 2] + 1),
    'flatten': (lambda n: (x[:n] + 1).reshape(-1), lambda k: (R[:k] + 1).reshape(-1)),
    'flatten, stored': (lambda n: (x[:n] + 1).reshape(-1).contiguous() * 2, lambda k: (R[:k] + 1).reshape(-1) * 2),
    'reshape': (lambda n: (x[:n] + 1).reshape(n * 2, 2) + 1, lambda k: (R[:k] + 1).reshape(k * 2, 2) + 1),
    'expand': (lambda n: x[0:1].expand(n, 4) + 1, lambda k: np.broadcast_to(R[0:1], (k, 4)) + 1),
    'cat': (lambda n: (x[:n] + 1).cat(x[n - 1:]), lambda k: np.concatenate([R[:k] + 1, R[k - 1:]])),
    'cat twice': (lambda n: x[:n].cat(x[:n] * 2), lambda k: np.concatenate([R[:k], R[:k] * 2])),
    'flip': (lambda n: x[:n].flip(0) + 1, lambda k: R[:k][::-1] + 1),
    'permute': (lambda n: (x[:n] + 1).T, lambda k: (R[:k] + 1).T),
    'ones': (lambda n: Tensor.ones(n, 3) + 1, lambda k: np.full((k, 3), 2, np.float32)),
    'zeros': (lambda n: Tensor.zeros(n, 3).contiguous(), lambda k: np.zeros((k, 3), np.float32)),
    'full': (lambda n: Tensor.full((n, 2), 7), lambda k: np.full((k, 2), 7)),
    'empty, written': (lambda n: Tensor.empty(n, 3).assign(Tensor.ones(n, 3)), lambda k: np.ones((k, 3), np.float32)),
    'running sums': (lambda n: x[:n].cumsum(0), lambda k: R[:k].cumsum(0)),
    'argmax': (lambda n: x[:n].argmax(0), lambda k: R[:k].argmax(0)),
    'from the end': (lambda n: x[-n:] + 1, lambda k: R[-k:] + 1),
    'number': (lambda n: x + Tensor(n), lambda k: R + k),
    'outer': (lambda n: x[:n, 0].reshape(n, 1) * x[:n, 1].reshape(1, n), lambda k: np.outer(R[:k, 0], R[:k, 1])),
    'stages': (lambda n: ((x[:n] + 1).contiguous().sum(0) + (x[:n] * 2).contiguous()).contiguous().softmax(0),
               lambda k: softmax((R[:k] + 1).sum(0) + R[:k] * 2, 0))}


@pytest.mark.parametrize('name', OPERATIONS)
def test_E11_one_schedule_and_one_compilation_for_every_length(name):
    tensors, arrays = OPERATIONS[name]
    n = Variable('n', 1, 8)
    same(tensors(n.bind(3)), arrays(3))
    before = work()
    for k in (8, 1, 5): same(tensors(n.bind(k)), arrays(k))
    assert work() == before


def test_E11_storage_has_the_largest_size_and_readers_see_the_actual_one():
    n = Variable('n', 1, 8).bind(3)
    y = (x[:n] + 1).realize()
    assert y.shape == (n, 4) and y.uop.op is Ops.SHRINK and y.uop.src[0].op is Ops.BUFFER and y.uop.src[0].shape == (8, 4)
    same(y, R[:3] + 1)
    same(y + x[:n], R[:3] * 2 + 1)   # two shapes of one bound variable are equal


def test_M4_a_symbolic_result_is_written_through_its_views():
    n = Variable('n', 1, 8).bind(3)
    y = x[:n] * 1
    row, later = y[0], y + 0
    y[1:2] = 7.0
    row.assign(Tensor([1.0, 2.0, 3.0, 4.0]))
    y += 1
    want = R[:3].copy()
    want[1], want[0] = 7, [1, 2, 3, 4]
    same(y, want + 1); same(row, want[0] + 1); same(later, R[:3]); same(x, R)


def test_I3_a_shape_without_a_value_has_no_numbers():
    with pytest.raises(RuntimeError, match='variable n has no value'): (x[:Variable('n', 1, 8)] + 1).numpy()


def test_sizes_are_brought_to_one_form():
    n = Variable('n', 1, 4)
    assert x[:n + n].shape == x[:n * 2].shape and x[n - 1:n].shape == (1, 4)
    assert UOp.const(n.dtype, 3).simplest() == 3 and Variable('one', 1, 1).simplest() == 1


@pytest.mark.parametrize('free', [False, True])
def test_E11_a_slice_fits_for_every_value_of_its_variable(free):
    "One schedule serves all values: replayed with another, none may read beyond the memory"
    n = Variable('n', 1, 20)
    n = n if free else n.bind(3)
    for cut in (lambda: x[:n], lambda: x[n:n + 1], lambda: x[:n * 3], lambda: x.reshape(32)[n * 4:n * 4 + 4]):
        with pytest.raises((ValueError, IndexError), match='wanted.* Try smaller bounds'): cut()


# ---------------------------------------------------------------- attention, gradients, several bindings

def test_E11_attention_over_a_cache_that_grows():
    heads, most, width = 2, 16, 4
    keys, values = (Tensor.zeros(heads, most, width).contiguous().realize() for _ in range(2))
    k_all, v_all = (np.zeros((heads, most, width), np.float32) for _ in range(2))
    pos, before = Variable('pos', 0, most - 1), None
    for i in range(6):
        q, k, v = (rng.standard_normal((heads, 1, width)).astype(np.float32) for _ in range(3))
        k_all[:, i:i + 1], v_all[:, i:i + 1] = k, v
        p = pos.bind(i)
        keys[:, p:p + 1].assign(Tensor(k)); values[:, p:p + 1].assign(Tensor(v))
        shares = (Tensor(q) @ keys[:, :p + 1].transpose(1, 2) * 0.5).softmax()
        same(shares @ values[:, :p + 1], softmax(q @ k_all[:, :i + 1].transpose(0, 2, 1) * 0.5) @ v_all[:, :i + 1])
        assert before in (None, work())
        before = work()
    same(keys, k_all)


def test_E11_gradients_through_symbolic_shapes():
    n, before = Variable('n', 1, 8), None
    for k in (3, 7, 1):
        a = Tensor(R, requires_grad=True)
        (a[:n.bind(k)] * 2).exp().sum().backward()
        want = np.zeros_like(R)
        want[:k] = 2 * np.exp(2 * R[:k])
        same(a.grad, want)
        assert before in (None, work())
        before = work()


def test_E11_a_symbolic_tensor_has_a_gradient_of_its_shape():
    n = Variable('n', 1, 8).bind(3)
    y = (x[:n] * 1).realize()
    (g,) = (y * y).sum().gradient(y)
    assert g.shape == y.shape
    same(g, 2 * R[:3])
    z = x[:n].contiguous()
    same((z.cat(z).pad(((1, 1), (0, 0))) * 3).mean().gradient(z)[0], np.full((3, 4), 6 / (8 * 4), np.float32))


def test_I2_two_bindings_of_one_variable_in_a_program():
    n = Variable('n', 1, 8)
    same(x[:n.bind(3)].cat(x[:n.bind(5)]), np.concatenate([R[:3], R[:5]]))
    before = work()
    same(x[:n.bind(4)].cat(x[:n.bind(6)]), np.concatenate([R[:4], R[:6]]))
    assert work() == before


def test_I1_values_of_free_variables_are_given_when_it_runs():
    n = Variable('n', 1, 8)
    total = (x[:n] * 2).sum(0)
    linear, values = total.linear_with_vars()
    assert values == {}
    for k in (2, 5):
        run_linear(linear, {'n': k})
        same(total, 2 * R[:k].sum(0))
    shown = x[:n.bind(3)] * 2
    linear, values = shown.linear_with_vars()
    assert values == {'n': 3}
    run_linear(linear, values)
    same(shown, R[:3] * 2)


def test_B4_names_and_values_of_variables_are_not_part_of_the_key():
    same(x[:Variable('n', 1, 8).bind(3)] * 5, R[:3] * 5)
    before = work()
    same(x[:Variable('other', 1, 8).bind(7)] * 5, R[:7] * 5)
    assert work() == before
    same(x[:Variable('n', 1, 7).bind(3)] * 5, R[:3] * 5)   # other bounds, other storage
    assert work() != before


def test_K7_the_planner_counts_symbolic_sizes_by_their_maximum():
    n = Variable('n', 1, 8)
    sizes = set()
    for k in (1, 8):
        y = x[:n.bind(k)]
        linear = ((y + 1).contiguous().sum(0) + (y * 3).contiguous()).contiguous().softmax(0).schedule_linear()
        sizes.add(sched_stats(linear)['tmp_after'])
        run_linear(linear)
    assert len(sizes) == 1 and sizes.pop() >= 8 * 4 * 4


# ---------------------------------------------------------------- writes

def test_M2_assignment_into_symbolic_slices():
    n, m = Variable('n', 1, 8).bind(3), Variable('m', 0, 4).bind(2)
    a, want = x.clone().realize(), R.copy()
    a[:n] = x[:n] * 2; want[:3] = R[:3] * 2
    a[n:] = 0; want[3:] = 0
    a[:n] += 1; want[:3] += 1
    a[n - 1] = Tensor([1.0, 2.0, 3.0, 4.0]); want[2] = [1, 2, 3, 4]
    a[m:m + 3] = a[m - m:3]; want[2:5] = want[:3].copy()   # overlapping, so staged first (M6)
    same(a, want)


def test_M5_clones_and_snapshots_of_symbolic_values():
    n = Variable('n', 1, 8).bind(3)
    y = x[:n].clone()
    z = y.contiguous()
    y[0] = 9
    want = R[:3].copy()
    want[0] = 9
    same(y, want); same(z, R[:3]); same(z.clone(), R[:3])
    stored = (x[:n] + 1).realize()
    kept = stored.contiguous()
    stored.assign(stored * 0)
    same(kept, R[:3] + 1); same(stored, R[:3] * 0)


def test_M3_a_reader_of_old_symbolic_storage_keeps_its_value():
    n = Variable('n', 1, 8).bind(3)
    e = Tensor.empty(n, 4)
    e.assign(x[:n])
    later, row = e + 1, e[1]
    e[0] = 5
    want = R[:3].copy()
    want[0] = 5
    same(e, want); same(later, R[:3] + 1); same(row, R[1])


def test_symbolic_values_travel_between_devices():
    n = Variable('n', 1, 8).bind(3)
    there = (x[:n] + 1).to('PYTHON')
    same(there, R[:3] + 1); same(there.to(x.device).cat(x[:n]), np.concatenate([R[:3] + 1, R[:3]])); same(x[:n].to('PYTHON'), R[:3])


def test_A5_a_symbolic_size_may_turn_out_to_be_zero():
    n = Variable('n', 0, 8).bind(0)
    same(x[:n] + 1, np.zeros((0, 4))); same((x[:n] + 1).sum(0), np.zeros(4)); same(x[:n].cat(x), R); same(Tensor.ones(n, 3).sum(), 0)
    same(x[:n].contiguous().realize().sum(), 0)


def test_symbolic_creation():
    n = Variable('n', 1, 8).bind(3)
    same(Tensor.arange(n), np.arange(3)); same(Tensor.arange(n, n + 4), np.arange(3, 7)); same(Tensor.arange(0, n * 4, 3), np.arange(0, 12, 3))
    same(Tensor.eye(n), np.eye(3)); same(Tensor.empty(n, 2).zeros_like() + 1, np.ones((3, 2)))
    Tensor.manual_seed(3)
    drawn = Tensor.rand(n, 3)
    assert drawn.numpy().shape == (3, 3)
    Tensor.manual_seed(3)
    same(Tensor.rand(3, 3), drawn.numpy())
    assert Tensor(n).item() == 3


# ---------------------------------------------------------------- bad input

n8, m8 = Variable('n', 1, 8), Variable('m', 1, 8)
REFUSED = {
    'two variables': (lambda: x[:n8.bind(3)] + x[:m8.bind(3)], ValueError, r'n=3.*m=3'),
    'two values': (lambda: x[:n8.bind(3)] + x[:n8.bind(4)], ValueError, r'n=3.*n=4'),
    'a variable and a number': (lambda: x[:n8.bind(3)] + x, ValueError, r'n=3 and 8'),
    'reshape': (lambda: x[:n8.bind(3)].reshape(m8.bind(3), 4), ValueError, r'\(n=3, 4\) cannot become \(m=3, 4\)'),
    'reshape to numbers': (lambda: x[:n8.bind(3)].reshape(12), ValueError, r'\(n=3, 4\) cannot become'),
    'no division': (lambda: x[:n8.bind(3)].reshape(-1, 3), ValueError, 'no size beside'),
    'too far': (lambda: x[:n8.bind(3) + 6], ValueError, r'axis 0, which has size 8'),
    'side of zero': (lambda: x[n8.bind(3) - 4], IndexError, r'numbers below 0 count from the end'),
    'step': (lambda: x[:n8.bind(3):2], IndexError, 'step 2'),
    'negative size': (lambda: Tensor.ones(n8.bind(3) - 5), ValueError, 'negative size'),
    'matmul': (lambda: x.T @ x[:n8.bind(3)], ValueError, r'8 columns meet n=3 rows'),
    'assign': (lambda: x.clone()[:n8.bind(3)].assign(Tensor.ones(m8.bind(2), 4)), ValueError, r'm=2.*n=3'),
    'len': (lambda: len(x[:n8.bind(3)]), TypeError, 'n=3 is symbolic'),
    'range': (lambda: range(x[:n8.bind(3)].shape[0]), TypeError, 'UOp'),
    'truth': (lambda: bool(x[:n8.bind(3)].shape[0] < 5), ValueError, 'true for some values'),
    'bounds': (lambda: n8.bind(9), ValueError, r'n to 9: wanted 1..8'),
    'unbound': ((x[:n8] + 1).numpy, RuntimeError, 'variable n has no value')}

@pytest.mark.parametrize('name', REFUSED)
def test_bad_symbolic_input_is_named_and_nothing_is_lost(name):
    act, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words): act()
    same(x, R)


def test_I3_a_number_with_a_loop_or_an_element_in_it_has_no_value_yet():
    i, p = UOp.range(4, 0), UOp.param(0, dtypes.int32, (4,))
    n = Variable('n', 1, 4)
    assert [u.value() for u in (n.bind(3) * 2, n * 2, i + n.bind(3), p.index(i).cast(dtypes.index))] == [6, None, None, None]
    assert p[i].shape == ()


def test_I4_a_value_must_suit_bounds_and_divisor():
    for bad in (0, 9): pytest.raises(ValueError, n8.bind, bad).match('wanted 1..8')
    even = Variable('even', 2, 8, divisor=2)
    pytest.raises(ValueError, even.bind, 3).match('a multiple of 2')
    same(x[:even.bind(6)] + 1, R[:6] + 1)


def test_python_conditions_that_bounds_decide():
    n = Variable('n', 1, 8)
    assert n < 9 and not n < 1 and n + 1 and not (n - n).simplest()
    assert repr(x[:n.bind(3)]).startswith('<Tensor (n=3, 4) float32') and repr((n * 2, 4)) == '(n*2, 4)'


# ---------------------------------------------------------------- random programs

class Both:
    "A Tensor and the array it must be; the program decides by the Tensor's symbolic shape, never by its numbers"
    def __init__(self, tensor, array):
        assert tensor.ndim == array.ndim
        self.t, self.a = tensor, array

    @property
    def shape(self): return self.t.shape

    def both(self, fn): return Both(fn(self.t), fn(self.a))


def number(n): return n if isinstance(n, int) else n.value()
def largest(n): return n if isinstance(n, int) else n.vmax
def least(n): return n if isinstance(n, int) else n.vmin

def cut(rng, v, a):
    "A part of one axis, provably inside it"
    axis, = rng.integers(0, v.t.ndim, 1)
    n = v.shape[axis]
    choices = [slice(0, 1), slice(-1, None), slice(None, None, -1), slice(n - 1, n)]
    if least(n) >= 2: choices += [slice(1, None), slice(None, -1)]
    if least(n) >= largest(a): choices += [slice(None, a), slice(-a, None), slice(a, None), slice(a - 1, a)]
    part = choices[rng.integers(len(choices))]
    plain = slice(*(s if s is None else number(s) for s in (part.start, part.stop, part.step)))
    before = (slice(None),) * axis
    return Both(v.t[*before, part], v.a[*before, plain])

def padded(rng, v, a):
    pairs = [(0, 0)] * v.t.ndim
    pairs[rng.integers(v.t.ndim)] = [(1, 2), (a, 0), (0, a), (0, a + 1)][rng.integers(4)]
    return Both(v.t.pad(tuple(pairs)), np.pad(v.a, [tuple(map(number, p)) for p in pairs]))

def reduced(rng, v, a):
    axis, keep = int(rng.integers(v.t.ndim)), bool(rng.integers(2))
    name = ['sum', 'max', 'mean'][rng.integers(3)]
    return Both(getattr(v.t, name)(axis, keepdim=keep), getattr(v.a, name)(axis, keepdims=keep))

def reshaped(rng, v, a):
    kind = rng.integers(3)
    if kind == 0: return Both(v.t.reshape(-1), v.a.reshape(-1))
    if kind == 1: return Both(v.t.unsqueeze(0), v.a[None])
    pieces = next((d for d in (4, 3, 2) if v.t.ndim and isinstance(v.shape[-1], int) and v.shape[-1] % d == 0), 1)
    rest = v.shape[-1] // pieces
    return Both(v.t.reshape(*v.shape[:-1], rest, pieces), v.a.reshape(*v.a.shape[:-1], number(rest), pieces))

def expanded(rng, v, a):
    return Both(v.t.unsqueeze(0).expand(a, *v.shape), np.broadcast_to(v.a[None], (number(a), *v.a.shape)))

def joined(rng, v, a):
    axis = int(rng.integers(v.t.ndim))
    return Both(v.t.cat(v.t * 2, dim=axis), np.concatenate([v.a, v.a * 2], axis))

def multiplied(rng, v, a):
    if v.t.ndim < 2: return v
    return Both(v.t @ v.t.transpose(-1, -2) * 0.25, v.a @ np.swapaxes(v.a, -1, -2) * np.float32(0.25))

def written(rng, v, a):
    "In place, on a copy: a part, through a view, and all of it"
    t, w = v.t.clone(), v.a.copy()
    t[0:1] = 3.0; w[0:1] = 3
    view = t.permute(*range(t.ndim)[::-1])
    view[-1:] += 1; np.transpose(w)[-1:] += 1
    if rng.integers(2): t.assign(t * 2); w *= 2
    return Both(t, w)

OPS = [cut, cut, padded, reduced, reshaped, expanded, joined, multiplied, written,
       lambda rng, v, a: v.both(lambda x: x * 0.5 + 1), lambda rng, v, a: v.both(abs),
       lambda rng, v, a: Both(v.t.exp2().sin(), np.sin(np.exp2(v.a))),
       lambda rng, v, a: Both(v.t.softmax(-1), softmax(v.a)),
       lambda rng, v, a: Both(v.t + a, v.a + number(a)),
       lambda rng, v, a: Both(v.t.permute(*range(v.t.ndim)[::-1]), v.a.T),
       lambda rng, v, a: Both(v.t.contiguous(), v.a), lambda rng, v, a: Both(v.t.realize(), v.a),
       lambda rng, v, a: Both(v.t + v.t.flip(0), v.a + v.a[::-1])]

def random_program(seed, device, a, b):
    "Results of a random program, whose shapes are made of two bound variables"
    rng = np.random.default_rng(seed)
    array = np.random.default_rng(7).standard_normal((12, 4)).astype(np.float32)
    whole = Tensor(array, device=device).realize()
    sizes = [a, b, a + b, a * 2, (a + 1) // 2]
    m = sizes[rng.integers(len(sizes))]
    pool = [Both(whole[:m], array[:number(m)]), Both(whole, array)]
    for _ in range(rng.integers(2, 7)):
        v = pool[rng.integers(len(pool))]
        if not v.t.ndim: continue
        new = OPS[rng.integers(len(OPS))](rng, v, sizes[rng.integers(len(sizes))])
        filled = all(least(n) > 0 for n in new.shape)
        if filled and new.t.ndim <= 4 and np.prod([largest(n) for n in new.shape]) <= 3000: pool.append(new)
    return pool[2:]

@pytest.mark.parametrize('device', ['PYTHON', 'CPU', 'CL'])
@pytest.mark.parametrize('seed', range(400 if os.environ.get('FUZZ') == '1' else 12))
def test_E11_fuzz_programs_agree_with_numpy_and_are_scheduled_once(seed, device):
    check_fuzz_program(seed, device)

def check_fuzz_program(seed, device):
    a, b, before = Variable('a', 1, 5), Variable('b', 2, 4), None
    for i, j in ((3, 2), (5, 4), (1, 3), (4, 4)):
        for got in random_program(seed, device, a.bind(i), b.bind(j)):
            assert tuple(map(number, got.shape)) == got.a.shape
            np.testing.assert_allclose(got.t.numpy(), got.a, rtol=1e-3, atol=1e-4, err_msg=f'seed {seed}, a={i}, b={j}')
        assert before in (None, work())
        before = work()
