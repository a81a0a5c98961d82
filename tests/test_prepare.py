"""Rules D of the scheduler: what is rewritten before there are loops."""
import itertools

import numpy as np
import pytest

from tinysched.frontend.tensor import Tensor
from tinysched.ir.dtype import dtypes, to_numpy
from tinysched.ir.spec import tensor_spec, verify
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import Ops
from tinysched.schedule.kernels import get_kernel_graph
from tinysched.schedule.pipeline import schedule
from tinysched.schedule.prepare import prepare

F32, I32, U8 = dtypes.float32, dtypes.int32, dtypes.uint8


def buffer(*shape, dtype=F32, device='CPU'): return UOp.buffer(device, shape, dtype)


def wrap(op, u, arg=None): return UOp(op, u.dtype, (u,), arg)


def assign(state, value): return state.after(state.store(value))


def value(u, out=None):
    "What prepare makes of a value that is stored somewhere"
    out = buffer(*u.shape, dtype=u.dtype, device='elsewhere') if out is None else out
    ready = prepare(UOp.sink(assign(out, u)))
    verify(ready, tensor_spec)
    return ready.src[0].src[1].src[1]


def ops(u): return [n.op.name for n in u.toposort()]


def tensor(*values, dtype=F32): return Tensor(list(values), device='PYTHON', dtype=dtype).realize()


# ---- D3: copies

def test_D3_a_copy_to_the_same_device_is_nothing():
    x = buffer(4)
    assert value(wrap(Ops.COPY, x, 'CPU')) is x
    assert value(wrap(Ops.COPY, x + 1, 'CPU')) is x + 1
    assert value(wrap(Ops.COPY, wrap(Ops.COPY, x, 'CL'), 'CL')) is wrap(Ops.COPY, x, 'CL')


def test_D3_a_copy_of_a_reshape_is_a_reshape_of_the_copy():
    x = buffer(2, 6)
    assert value(wrap(Ops.COPY, x.reshape((3, 4)), 'CL') + 1).src[0] is wrap(Ops.COPY, x, 'CL').reshape((3, 4))
    assert value(wrap(Ops.COPY, x.reshape((12,)).reshape((4, 3)), 'CL') + 1).src[0] is \
        wrap(Ops.COPY, x, 'CL').reshape((12,)).reshape((4, 3))


def test_A4_a_reshaped_copy_goes_straight_into_the_reshaped_target():
    x, out = buffer(2, 6), buffer(3, 4, device='CL')
    ready = prepare(UOp.sink(assign(out, wrap(Ops.COPY, x.reshape((3, 4)), 'CL'))))
    assert ready.src[0].src[1].src == (out.reshape((2, 6)), wrap(Ops.COPY, x, 'CL'))
    assert [c.src[0].op for c in schedule(ready).src] == [Ops.STORE]


@pytest.mark.parametrize('view', ['permute', 'flip', 'shrink', 'pad', 'expand', 'add'])
def test_D3_a_copy_of_anything_else_is_staged_first(view):
    x, column = buffer(2, 3), buffer(2, 1)
    u = dict(permute=lambda: x.permute((1, 0)), flip=lambda: x.flip((0,)), shrink=lambda: x.shrink(((0, 2), (0, 2))),
             pad=lambda: x.pad(((1, 0), (0, 0))), expand=lambda: column.expand((2, 3)), add=lambda: x + 1)[view]()
    got = value(wrap(Ops.COPY, u, 'CL'))
    assert got.op is Ops.COPY and got.src[0].op is Ops.STAGE and got.src[0].src[0] is u
    assert value(wrap(Ops.COPY, wrap(Ops.STAGE, x + 1), 'CL')).src[0] is wrap(Ops.STAGE, x + 1)


def test_D3_a_copy_of_one_stretch_of_memory_needs_no_stage():
    row = buffer(2, 3).shrink(((1, 2), (0, 3)))
    assert value(wrap(Ops.COPY, row, 'CL')) is wrap(Ops.COPY, row, 'CL')
    graph = get_kernel_graph(prepare(UOp.sink(assign(buffer(1, 3, device='CL'), wrap(Ops.COPY, row, 'CL')))))
    assert [u.src[0].op for u in graph.toposort() if u.op is Ops.CALL] == [Ops.STORE]


def test_D3_a_copy_becomes_one_bulk_store():
    x, out = buffer(4), buffer(4, device='CL')
    graph = get_kernel_graph(prepare(UOp.sink(assign(out, wrap(Ops.COPY, x.flip((0,)), 'CL') + 1))))
    bodies = [u.src[0].op for u in graph.toposort() if u.op is Ops.CALL]
    assert sorted(b.name for b in bodies) == ['SINK', 'SINK', 'STORE']      # stage, copy, add
    copied = next(u for u in graph.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.STORE)
    assert copied.src[1].op is Ops.ALLOC and copied.src[1].device == 'CL'


def test_D3_views_on_other_devices():
    x = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4), device='PYTHON').realize()
    n = x.numpy()
    for v, want in ((x[1:], n[1:]), (x.T, n.T), (x.flip(1), n[:, ::-1]), (x.reshape(4, 3), n.reshape(4, 3)),
                    (x + 1, n + 1), (x[:, 1:3], n[:, 1:3])):
        np.testing.assert_array_equal(v.to('NPY').numpy(), want)


def test_D3_a_part_of_what_was_just_written():
    x = tensor(1, 2, 3, 4)
    x.assign(x + 1)
    y = x[1:3].to('NPY')
    assert y.tolist() == [3, 4]


# ---- D4: hazards

def kernels(target, u):
    graph = get_kernel_graph(prepare(UOp.sink(target.base.after(target.store(u)))))
    return sum(n.op is Ops.CALL for n in graph.toposort())


def test_D4_the_same_index_is_no_hazard():
    a, b = buffer(4, 4), buffer(4, 4)
    for u in (a + 1, a * a + b, a.permute((1, 0)).permute((1, 0)) + 1, a.flip((0,)).flip((0,)) * 2,
              a.reshape((16,)).reshape((4, 4)) + 1, b.flip((0,))):
        assert kernels(a, u) == 1
    half = a.shrink(((0, 2), (0, 4)))
    assert kernels(half, half * 2) == 1


def test_D4_another_index_is_staged():
    a = buffer(4, 4)
    for u in (a.flip((0,)), a.permute((1, 0)), a + a.flip((1,)), a.shrink(((1, 4), (0, 4))).pad(((0, 1), (0, 0))),
              a.shrink(((0, 1), (0, 4))).expand((4, 4)), a.reshape((16,)).flip((0,)).reshape((4, 4))):
        assert kernels(a, u) == 2
    half, rest = a.shrink(((0, 2), (0, 4))), a.shrink(((1, 3), (0, 4)))
    assert kernels(half, rest * 2) == 2


def test_D4_store_by_store():
    a, b = buffer(4), buffer(4)
    sink = UOp.sink(assign(a, a + 1), assign(b, b.flip((0,))))
    assert sum(n.op is Ops.CALL for n in get_kernel_graph(prepare(sink)).toposort()) == 3


@pytest.mark.parametrize('write', [
    lambda x: x.assign(x + 1), lambda x: x.assign(x.flip(0)), lambda x: x.assign(x.T), lambda x: x.assign(x * x.sum()),
    lambda x: x[1:].assign(x[:-1]), lambda x: x[:-1].assign(x[1:]), lambda x: x[1:].assign(x[1:] * 2),
    lambda x: x.assign(x[:-1].pad(((1, 0), (0, 0)))), lambda x: x.assign(x @ x), lambda x: x.flip(0).assign(x)])
def test_D4_values(write):
    x = Tensor(np.arange(9, dtype=np.float32).reshape(3, 3), device='PYTHON').realize()
    class Array(np.ndarray):
        def assign(self, v): self[...] = np.array(v)
        def flip(self, axis): return np.flip(self, axis)
        def pad(self, pairs): return np.pad(self, pairs)
    n = np.arange(9, dtype=np.float32).reshape(3, 3).view(Array)
    write(n)
    write(x)
    np.testing.assert_array_equal(x.numpy(), n)


# ---- D5: stores

def test_D5_a_state_into_itself_is_nothing():
    x = buffer(4)
    part = x.shrink(((1, 3),))
    for effect in (x.store(x), x.store(wrap(Ops.STAGE, x)), x.store(wrap(Ops.DETACH, x)), part.store(part)):
        assert prepare(UOp.sink(x.after(effect))).src == ()
    t = tensor(1, 2, 3)
    t.assign(t)
    t[1:] = t[1:]
    assert t.schedule_linear().src == ()


def test_D5_the_same_store_twice_is_one():
    x, y = buffer(4), buffer(4)
    once = assign(x, y)
    assert prepare(UOp.sink(x.after(x.store(y), x.store(y)))).src == (once,)
    assert prepare(UOp.sink(assign(once, y))).src == (once,)
    assert prepare(UOp.sink(assign(assign(once, y), y))).src == (once,)
    half = lambda s: s.shrink(((0, 2),))
    first = x.after(half(x).store(half(y)))
    assert prepare(UOp.sink(first.after(half(first).store(half(y))))).src == (first,)
    t, v = tensor(1, 2), tensor(3, 4)
    t.assign(v)
    t.assign(v)
    assert len(t.schedule_linear().src) == 1


def test_D5_another_store_is_kept():
    x, y = buffer(4), buffer(4)
    once = assign(x, y)
    left, right = (lambda s: s.shrink(((0, 2),))), (lambda s: s.shrink(((2, 4),)))
    partly = x.after(left(x).store(left(y)))
    for u in (assign(once, once + 1), assign(once, y + 1), partly.after(right(partly).store(left(y))),
              assign(assign(once, y + 1), y)):
        assert prepare(UOp.sink(u)).src == (u,)
    t = tensor(1, 2)
    for _ in range(3): t.assign(t + 1)
    assert t.tolist() == [4, 5]


def test_D5_a_bitcast_target_moves_to_the_value():
    x, v = buffer(4), buffer(4, dtype=I32)
    assert prepare(UOp.sink(x.after(x.bitcast(I32).store(v)))).src == (assign(x, v.bitcast(F32)),)
    flipped = x.bitcast(I32).flip((0,)).reshape((2, 2))
    got = prepare(UOp.sink(x.after(flipped.store(v.reshape((2, 2)))))).src[0].src[1]
    assert got.src[0] is x.flip((0,)).reshape((2, 2)) and got.src[1] is v.reshape((2, 2)).bitcast(F32)


VIEWS = dict(
    whole=lambda t: t, part=lambda t: t[1:2], columns=lambda t: t[:, 3:9], steps=lambda t: t[:, ::3],
    flipped=lambda t: t[::-1], turned=lambda t: t.T if isinstance(t, np.ndarray) else t.permute(1, 0),
    inner=lambda t: t[:, 2:10][:, 1:-1:2])


@pytest.mark.parametrize('name', VIEWS)
@pytest.mark.parametrize('old, new', [(F32, U8), (F32, I32), (F32, dtypes.int16), (dtypes.uint16, U8),
                                      (dtypes.int16, dtypes.int64), (U8, F32)])
def test_D5_writes_through_views_of_another_dtype(name, old, new):
    size = 16 * max(1, new.itemsize // old.itemsize)
    data = np.arange(3 * size, dtype=to_numpy(old)).reshape(3, size)
    x = Tensor(data, device='PYTHON', dtype=old).realize()
    seen, wanted = VIEWS[name](x.bitcast(new)), VIEWS[name](data.view(to_numpy(new)))
    fresh = (np.arange(wanted.size) % 50 + 7).astype(wanted.dtype).reshape(wanted.shape)
    seen.assign(Tensor(fresh, device='PYTHON', dtype=new))
    wanted[...] = fresh
    assert x.numpy().tobytes() == data.tobytes()


# ---- D7: nothing

@pytest.mark.parametrize('op, want', [(Ops.ADD, 0.0), (Ops.MUL, 1.0), (Ops.MAX, float('-inf'))])
def test_D7_a_reduction_over_nothing_is_the_identity_element(op, want):
    got = value((buffer(0, 3) * 2)._reduce(op, (0,)))
    assert got.base is UOp.const(F32, want) and got.shape == (1, 3) and 'BUFFER' not in ops(got)


def test_D7_the_least_integer():
    for dtype in (dtypes.int8, dtypes.uint8, dtypes.int64):
        assert value(buffer(0, 3, dtype=dtype)._reduce(Ops.MAX, (0,))).base.arg == dtypes.min(dtype)


def test_D7_padding_of_nothing():
    got = value((buffer(0, 3) + 1).pad(((1, 1), (0, 0))))
    assert got.base is UOp.const(F32, 0.0) and got.shape == (2, 3)


def test_D7_stores_of_nothing():
    x, y = buffer(4), buffer(0, 4)
    assert prepare(UOp.sink(x.after(x.shrink(((2, 2),)).store(UOp.const(F32, 1.0))))).src == ()
    assert prepare(UOp.sink(assign(y, y + 1))).src == ()
    kept = x.shrink(((0, 1),)).store(UOp.const(F32, 1.0))
    assert prepare(UOp.sink(x.after(x.shrink(((2, 2),)).store(UOp.const(F32, 2.0)), kept))).src == (x.after(kept),)


def test_D7_values():
    t = Tensor(np.zeros((0, 3), np.float32), device='PYTHON')
    assert t.sum(0).tolist() == [0] * 3 and t.prod(0).tolist() == [1] * 3 and t.max(0).tolist() == [float('-inf')] * 3
    assert t.sum().item() == 0 and t.sum(1).tolist() == []
    assert t.cat(Tensor([[1., 2., 3.]], device='PYTHON')).tolist() == [[1, 2, 3]]
    assert (t @ Tensor(np.ones((3, 2), np.float32), device='PYTHON')).shape == (0, 2)
    assert (t.permute(1, 0) @ t).tolist() == [[0] * 3] * 3
    assert t.sum(0).schedule_linear().src == () or len(t.sum(0).contiguous().schedule_linear().src) == 1


# ---- D8: elements of another size

TYPES = [U8, dtypes.int8, dtypes.uint16, dtypes.int16, dtypes.float16, I32, F32, dtypes.int64, dtypes.float64]


@pytest.mark.parametrize('old, new', [(a, b) for a, b in itertools.product(TYPES, TYPES) if a.itemsize != b.itemsize])
def test_D8_a_bitcast_of_a_value_between_sizes(old, new):
    data = np.random.default_rng(0).integers(-100, 100, (3, 8)).astype(to_numpy(old))
    t = Tensor(data, device='PYTHON', dtype=old).realize()
    got = (t + 1).bitcast(new).contiguous().numpy()     # one kernel
    assert got.tobytes() == (data + data.dtype.type(1)).view(to_numpy(new)).tobytes()


# ---- D9 and A11

def test_D9_the_sink_refers_to_bases():
    x, y, z = buffer(4), buffer(4), buffer(2)
    one, two = assign(x, y), assign(z, z + 1)
    sink = UOp.sink(one.reshape((2, 2)).permute((1, 0)), one, two.shrink(((0, 1),)), y, z.reshape((2, 1)))
    assert prepare(sink).src == (one, two)
    assert prepare(UOp.sink(UOp.param(0, F32, (4,)), assign(x, x))).src == ()


def test_A11_what_only_gradients_look_at_is_gone():
    x = buffer(4)
    u = wrap(Ops.CONTIGUOUS_BACKWARD, wrap(Ops.DETACH, x + 1) * 2)
    assert value(u) is (x + 1) * 2
    marked = UOp.const(F32, 2.0).replace(tag='mine')
    assert value(x * marked) is x * 2
