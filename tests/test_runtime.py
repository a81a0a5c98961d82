"Devices, buffers and running: kernels written by hand, on every device that works, against NumPy"
import gc
import threading

import numpy as np
import pytest

from tinysched.frontend.tensor import Tensor
from tinysched.helpers import Context, GlobalCounters, profile_events
from tinysched.ir.dtype import dtypes, from_numpy, to_storage
from tinysched.ir.uop import AxisType, KernelInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime.device import (KINDS, Buffer, Device, HostMemory, Limits, NULL, Unavailable, buffer_of,
                                      host_buffer)
from tinysched.runtime.realize import compile_linear, mark_pending, programs, run_linear

ALL = [name for name in ('PYTHON', 'CPU', 'CL') if not Device.failure(name)]
f32, index = dtypes.float32, dtypes.index
on_all = pytest.mark.parametrize('device', ALL)

# ---- building by hand ------------------------------------------------------------------------------------
def c(value, dt=index): return UOp.const(dt, value)
def bi(op, *xs): return UOp(op, dtypes.bool if op in (Ops.CMPLT, Ops.CMPNE) else xs[-1].dtype, xs)
def add(a, b): return bi(Ops.ADD, a, b)
def mul(a, b): return bi(Ops.MUL, a, b)
def flat(i, n, j): return add(mul(i, c(n)), j)
def param(slot, size, dt=f32): return UOp.param(slot, dt, (size,))
def reduce(op, x, *loops): return UOp(Ops.REDUCE, x.dtype, (x, *loops), (op, ()))
def loop(n, number): return UOp.range(n, number)
def red(n, number): return UOp.range(n, number, AxisType.REDUCE)
def kernel(*effects, name='k'): return UOp.sink(*effects, arg=KernelInfo(name))
def linear(*calls): return UOp(Ops.LINEAR, dtypes.void, calls)

def filled(device, array, dt=None):
    "A BUFFER on the device with these values"
    array = np.asarray(array)
    dt = dt or from_numpy(array.dtype)
    u = UOp.buffer(device, array.shape, dt)
    raw = np.ascontiguousarray(to_storage(array, dt)).reshape(-1)
    if raw.size: buffer_of(u).copyin(raw.view(np.uint8).data)
    return u

def read(u): return buffer_of(u).numpy().reshape(u.shape)

def run(device, ast, out, *arrays, dts=(), var_vals=None):
    "What the kernel leaves in `out`"
    dts = list(dts) + [None] * (1 + len(arrays) - len(dts))
    bufs = [filled(device, a, dt) for a, dt in zip((out, *arrays), dts)]
    run_linear(linear(ast.call(*bufs)), var_vals)
    return read(bufs[0])

def elementwise(fn, n, *dts):
    "Kernel out[i] = fn(in0[i], ...)"
    i = loop(n, 0)
    value = fn(*(param(1 + k, n, dt).index(i) for k, dt in enumerate(dts)))
    return kernel(param(0, n, value.dtype).index(i).store(value).end(i))

def plus_one(n=4): return elementwise(lambda x: add(x, c(1.0, f32)), n, f32)

rng = np.random.default_rng(0)
def rnd(*shape): return rng.standard_normal(shape).astype(np.float32)

class NoDriver(NULL):
    def __init__(self, index=0): raise Unavailable('CL needs a driver: install PoCL.')

# ---- names -----------------------------------------------------------------------------------------------
def test_device_names():
    assert Device.canonicalize('cpu:0') == Device.canonicalize('Cpu') == 'CPU'
    assert Device.canonicalize('python:1') == 'PYTHON:1'
    assert Device.canonicalize(None) == Device.DEFAULT
    assert Device['python'] is Device['PYTHON:0'] and Device['PYTHON:1'] is not Device['PYTHON']
    assert Device['PYTHON:1'].name == 'PYTHON:1' and repr(Device['NULL']) == "Device['NULL']"
    with pytest.raises(ValueError, match='GPU.*CPU CL PYTHON'): Device['GPU']
    with pytest.raises(ValueError, match='number after the colon'): Device.canonicalize('CPU:one')
    for wrong in (None, 3, ('CPU',)):
        with pytest.raises(TypeError, match="wanted a name, like 'CPU'"): Device[wrong]

def test_a_path_is_kept_exactly():
    class Disk(NULL): kind = 'DISK'
    had = KINDS.get('DISK')
    Device.register('disk', Disk)
    try: assert Device.canonicalize('disk:/Tmp/a:B.bin') == 'DISK:/Tmp/a:B.bin'
    finally:
        del KINDS['DISK']
        if had: KINDS['DISK'] = had

def test_default_device():
    assert Device.DEFAULT in ALL and Device.available()[-1] == 'PYTHON'
    with Context(DEV='python:1'): assert Device.DEFAULT == 'PYTHON:1'
    before = Device.DEFAULT
    try:
        Device.DEFAULT = 'null'
        assert Device.DEFAULT == 'NULL'
    finally: Device.DEFAULT = before

def test_unavailable_device_says_so_once(capsys):
    class Broken(NULL):
        def __init__(self, index=0): raise Unavailable('CPU needs a C compiler: install gcc')
    from tinysched.runtime.device import Devices
    had, KINDS['CPU'], KINDS['CL'] = (KINDS['CPU'], KINDS['CL']), Broken, Broken
    try:
        d = Devices()
        with Context(DEV=''): assert d.DEFAULT == 'PYTHON' == d.DEFAULT
        assert d.available() == ['PYTHON']
        with pytest.raises(Unavailable, match='install gcc'): d['CPU']
    finally: KINDS['CPU'], KINDS['CL'] = had
    said = capsys.readouterr().err
    assert said.count('\n') == 1 and 'PYTHON' in said and 'install gcc' in said

def test_limits_are_data():
    for name in ALL:
        limits = Device[name].limits
        assert isinstance(limits, Limits) and hash(limits) == hash(Limits(*limits)) and limits.max_args > 4

# ---- buffers ---------------------------------------------------------------------------------------------
def test_memory_is_lazy_counted_and_freed():
    gc.collect()
    before = GlobalCounters.mem_used
    b = Buffer('PYTHON', 1000, f32)
    v = b.view(10, f32, 40).view(5, f32, 8)
    assert GlobalCounters.mem_used == before and b.memory is None
    v.ensure_allocated()
    assert GlobalCounters.mem_used == before + 4000 and v.base is b and v.offset == 48
    del b
    assert GlobalCounters.mem_used == before + 4000   # the view holds its root
    del v
    assert GlobalCounters.mem_used == before

def test_buffer_of_a_node_lives_as_long_as_the_node():
    before = GlobalCounters.mem_used
    u = filled('PYTHON', rnd(100))
    assert buffer_of(u) is buffer_of(u) and GlobalCounters.mem_used == before + 400
    del u
    assert GlobalCounters.mem_used == before

def test_no_bytes_no_memory():
    b = Buffer('PYTHON', 0, f32).ensure_allocated()
    assert b.memory is None and b.numpy().shape == (0,)

def test_views_of_storage():
    u = filled('PYTHON', np.arange(24, dtype=np.float32))
    v = u.shrink(((4, 16),)) if hasattr(u, 'shrink') else UOp(Ops.SHRINK, f32, (u,), ((4, 16),))
    w = UOp(Ops.SHRINK, f32, (UOp(Ops.RESHAPE, f32, (v,), (3, 4)),), ((1, 3), (0, 4)))
    b = buffer_of(UOp(Ops.BITCAST, dtypes.int32, (w,)))
    assert (b.base, b.offset, b.size, b.dtype) == (buffer_of(u), 32, 8, dtypes.int32)
    assert (b.numpy().view(np.float32) == np.arange(8, 16)).all()
    bad = UOp(Ops.SHRINK, f32, (UOp(Ops.RESHAPE, f32, (v,), (3, 4)),), ((0, 3), (0, 2)))
    with pytest.raises(RuntimeError, match='one stretch'): buffer_of(bad)
    with pytest.raises(RuntimeError, match='no storage'): buffer_of(c(1.0, f32))

def test_host_buffer_is_a_snapshot():
    a = np.arange(6.).reshape(2, 3)
    u = host_buffer(a)
    a[:] = 7
    assert u.shape == (2, 3) and (read(u) == np.arange(6.).reshape(2, 3)).all()
    assert read(host_buffer(np.array(3.0))).shape == ()
    assert (read(host_buffer(np.arange(6.).reshape(2, 3).T)) == np.arange(6.).reshape(2, 3).T).all()
    half = host_buffer(np.array([1.0, 1.00001]), dtypes.bfloat16)
    assert buffer_of(half).nbytes == 4 and (read(half) == [1, 1]).all()

def test_wrong_sizes_are_refused():
    b = Buffer('PYTHON', 4, f32)
    with pytest.raises(ValueError, match='3 bytes'): b.copyin(bytearray(3).__class__(3) and memoryview(bytearray(3)))
    with pytest.raises(ValueError, match='view of'): b.view(4, f32, 4)

# ---- kernels ---------------------------------------------------------------------------------------------
@on_all
@pytest.mark.parametrize('n', [1, 3, 64, 1001])
def test_elementwise(device, n):
    x = rnd(n)
    assert (run(device, plus_one(n), np.zeros(n, np.float32), x) == x + np.float32(1)).all()

@on_all
def test_softmax_in_one_kernel(device):
    R, C = 7, 33
    r, j, k, l = loop(R, 0), red(C, 1), red(C, 2), loop(C, 3)
    x = lambda col: param(1, R * C).index(flat(r, C, col))
    top = reduce(Ops.MAX, x(j), j)
    e = lambda col: bi(Ops.EXP2, bi(Ops.SUB, x(col), top))
    e = lambda col: UOp(Ops.EXP2, f32, (bi(Ops.SUB, x(col), top),))
    value = bi(Ops.FDIV, e(l), reduce(Ops.ADD, e(k), k))
    ast = kernel(param(0, R * C).index(flat(r, C, l)).store(value).end(r, l))
    a = rnd(R, C)
    want = np.exp2(a - a.max(1, keepdims=True))
    np.testing.assert_allclose(run(device, ast, np.zeros((R, C), np.float32), a), want / want.sum(1, keepdims=True), rtol=1e-5)

@on_all
@pytest.mark.parametrize('shape', [(5, 7, 3), (16, 16, 16), (33, 1, 65)])
def test_matmul(device, shape):
    M, N, K = shape
    i, j, k = loop(M, 0), loop(N, 1), red(K, 2)
    prod = mul(param(1, M * K).index(flat(i, K, k)), param(2, K * N).index(flat(k, N, j)))
    ast = kernel(param(0, M * N).index(flat(i, N, j)).store(reduce(Ops.ADD, prod, k)).end(i, j))
    a, b = rnd(M, K), rnd(K, N)
    np.testing.assert_allclose(run(device, ast, np.zeros((M, N), np.float32), a, b), a @ b, rtol=1e-4, atol=1e-4)

@on_all
def test_gates_touch_no_memory(device):
    n = 6
    i = loop(n, 0)
    gate = bi(Ops.CMPLT, c(1), i)
    ast = kernel(param(0, n).index(i).store(param(1, n - 2).index(bi(Ops.SUB, i, c(2)), gate)).end(i))
    assert (run(device, ast, np.ones(n, np.float32), np.arange(1, 5, dtype=np.float32)) == [0, 0, 1, 2, 3, 4]).all()
    masked = kernel(param(0, n).index(i, gate).store(c(5.0, f32)).end(i))
    assert (run(device, masked, np.ones(n, np.float32)) == [1, 1, 5, 5, 5, 5]).all()

@on_all
def test_reductions(device):
    for op, np_op in ((Ops.ADD, np.sum), (Ops.MUL, np.prod), (Ops.MAX, np.max)):
        for a in (rnd(40), np.arange(1, 9, dtype=np.int32)):
            k, dt = red(a.size, 0), from_numpy(a.dtype)
            ast = kernel(param(0, 1, dt).index(c(0)).store(reduce(op, param(1, a.size, dt).index(k), k)))
            np.testing.assert_allclose(run(device, ast, np.zeros(1, a.dtype), a)[0], np_op(a), rtol=1e-5)

@on_all
def test_reduce_under_a_reduce(device):
    "sum over i of (max over j of a[i, j]) squared, and a constant under a reduce"
    i, j = red(4, 0), red(5, 1)
    m = reduce(Ops.MAX, param(1, 20).index(flat(i, 5, j)), j)
    ast = kernel(param(0, 1).index(c(0)).store(reduce(Ops.ADD, mul(m, m), i)))
    a = rnd(4, 5)
    np.testing.assert_allclose(run(device, ast, np.zeros(1, np.float32), a)[0], (a.max(1) ** 2).sum(), rtol=1e-5)
    ones = kernel(param(0, 1).index(c(0)).store(reduce(Ops.ADD, c(1.0, f32), red(7, 0))))
    assert run(device, ones, np.zeros(1, np.float32))[0] == 7

@on_all
def test_several_outputs_and_in_place(device):
    i, j = loop(4, 0), loop(4, 1)
    x = param(0, 4).index(i)
    ast = kernel(x.store(add(x, c(1.0, f32))).end(i), param(1, 4).index(j).store(c(2.0, f32)).end(j))
    bufs = [filled(device, np.arange(4, dtype=np.float32)), filled(device, np.zeros(4, np.float32))]
    run_linear(linear(ast.call(*bufs)))
    assert (read(bufs[0]) == [1, 2, 3, 4]).all() and (read(bufs[1]) == 2).all()

INTS = [(np.int32, dtypes.int32), (np.int8, dtypes.int8), (np.int64, dtypes.int64)]

@on_all
@pytest.mark.parametrize('np_dt,dt', INTS)
def test_division_rounds_down_and_by_zero_gives_zero(device, np_dt, dt):
    a = np.array([7, -7, 7, -7, 5, 0, -1], np_dt)
    b = np.array([2, 2, -2, -2, 0, 3, 3], np_dt)
    for op, want in ((Ops.IDIV, [3, -4, -4, 3, 0, 0, -1]), (Ops.MOD, [1, 1, -1, -1, 0, 0, 2])):
        got = run(device, elementwise(lambda x, y, op=op: bi(op, x, y), 7, dt, dt), np.zeros(7, np_dt), a, b)
        assert (got == want).all(), (op, got)

@on_all
def test_shifts_by_the_width_give_zero(device):
    for dt, np_dt, bits in ((dtypes.int32, np.int32, 32), (dtypes.uint8, np.uint8, 8), (dtypes.uint64, np.uint64, 64)):
        a, b = np.array([3] * 4, np_dt), np.array([0, 1, bits - 1, bits], np_dt)
        left = run(device, elementwise(lambda x, y: bi(Ops.SHL, x, y), 4, dt, dt), np.zeros(4, np_dt), a, b)
        right = run(device, elementwise(lambda x, y: bi(Ops.SHR, x, y), 4, dt, dt), np.zeros(4, np_dt), a, b)
        with np.errstate(all='ignore'): assert (left == [3, 6, a[0] << np_dt(bits - 1), 0]).all()
        assert (right == [3, 1, 0, 0]).all()

@on_all
def test_nan_goes_through_max(device):
    a, b = np.array([np.nan, 1, 2, -0.0], np.float32), np.array([1, np.nan, 3, 0.0], np.float32)
    got = run(device, elementwise(lambda x, y: bi(Ops.MAX, x, y), 4, f32, f32), np.zeros(4, np.float32), a, b)
    assert np.isnan(got[:2]).all() and got[2] == 3

@on_all
def test_integers_wrap(device):
    a = np.array([127, -128], np.int8)
    got = run(device, elementwise(lambda x: add(x, x), 2, dtypes.int8), np.zeros(2, np.int8), a)
    assert (got == [-2, 0]).all()

@on_all
@pytest.mark.parametrize('dt', [dtypes.float16, dtypes.bfloat16])
def test_half_types_round_after_each_step(device, dt):
    x = np.array([1.0, 3.140625, 100.0, 0.3], np.float32)
    fn = lambda v: mul(add(v, c(0.001, dt)), c(3.0, dt))
    from tinysched.runtime.python import narrow
    want = narrow(narrow(narrow(x, dt) + narrow(np.float32(0.001), dt), dt) * np.float32(3), dt)
    got = run(device, elementwise(fn, 4, dt), np.zeros(4, np.float32), x, dts=(dt, dt))
    assert (got.astype(np.float32) == want).all()

@on_all
def test_casts(device):
    x = np.array([2.9, -2.9, 0.0, 255.5], np.float32)
    to = lambda dt: elementwise(lambda v: UOp(Ops.CAST, dt, (v,)), 4, f32)
    assert (run(device, to(dtypes.int32), np.zeros(4, np.int32), x) == [2, -2, 0, 255]).all()
    assert (run(device, to(dtypes.bool), np.zeros(4, bool), x) == [True, True, False, True]).all()
    bits = elementwise(lambda v: UOp(Ops.BITCAST, dtypes.int32, (v,)), 4, f32)
    assert (run(device, bits, np.zeros(4, np.int32), x) == x.view(np.int32)).all()

@on_all
def test_one_kernel_for_all_values_of_a_variable(device):
    n = UOp.variable('n', 1, 10)
    i = loop(n, 0)
    ast = kernel(param(0, 10).index(i).store(param(1, 10).index(i)).end(i))
    for value in (4, 10):
        got = run(device, ast, np.zeros(10, np.float32), np.ones(10, np.float32), var_vals={'n': value})
        assert got.sum() == value
    bound = [filled(device, np.zeros(10, np.float32)), filled(device, np.ones(10, np.float32))]
    run_linear(linear(ast.call(*bound, n.bind(3))))
    assert read(bound[0]).sum() == 3

@on_all
def test_offsets_are_given_at_launch(device):
    u = filled(device, np.arange(12, dtype=np.float32))
    part = lambda lo: UOp(Ops.SHRINK, f32, (u,), ((lo, lo + 4),))
    count = lambda: sum(map(len, programs.values()))
    before = count()
    run_linear(linear(plus_one().call(part(8), part(0)), plus_one().call(part(4), part(0))))
    assert (read(u) == [0, 1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 4]).all()
    assert count() <= before + 1

def test_interpreter_refuses_indexes_outside():
    i = loop(4, 0)
    for shift in (1, -1):
        bad = kernel(param(0, 4).index(i).store(param(1, 4).index(add(i, c(shift)))).end(i))
        with Context(CHECK_OOB=0), pytest.raises(IndexError, match='argument 1 of 4'): run('PYTHON', bad, np.zeros(4, np.float32), rnd(4))

def test_interpreter_works_in_pieces(monkeypatch):
    import tinysched.runtime.python as py
    a = rnd(6, 11)
    i, k = loop(6, 0), red(11, 1)
    ast = kernel(param(0, 6).index(i).store(reduce(Ops.ADD, param(1, 66).index(flat(i, 11, k)), k)).end(i))
    for most in (1, 2, 7, 12, 1 << 20):
        monkeypatch.setattr(py, 'MOST', most)
        np.testing.assert_allclose(run('PYTHON', ast, np.zeros(6, np.float32), a), a.sum(1), rtol=1e-5)

# ---- running ---------------------------------------------------------------------------------------------
def test_copies_between_devices():
    x = rnd(5)
    for a in ALL:
        for b in ALL:
            src, dst = filled(a, x), filled(b, np.zeros(5, np.float32))
            body = UOp.param(0, f32, (5,), b).store(UOp.param(1, f32, (5,), a))
            run_linear(linear(body.call(dst, src)))
            assert (read(dst) == x).all(), (a, b)

def test_mixed_devices_in_a_kernel():
    with pytest.raises(RuntimeError, match='PYTHON and PYTHON:1|PYTHON:1 and PYTHON'):
        run_linear(linear(plus_one().call(filled('PYTHON', rnd(4)), filled('PYTHON:1', rnd(4)))))

def test_null_counts_and_computes_nothing():
    GlobalCounters.reset()
    bufs = [UOp.buffer('NULL', (10**12,), f32), UOp.buffer('NULL', (10**12,), f32)]
    run_linear(linear(plus_one(10**12).call(*bufs)))
    assert (GlobalCounters.kernel_count, GlobalCounters.global_ops, GlobalCounters.global_mem) == (1, 10**12, 8 * 10**12)
    with pytest.raises(RuntimeError, match='NULL computes nothing'): buffer_of(UOp.buffer('NULL', (1,), f32)).numpy()

def test_I3_a_free_variable_has_no_value():
    n = UOp.variable('rows', 1, 8)
    i = loop(n, 0)
    ast = kernel(param(0, 8).index(i).store(c(1.0, f32)).end(i), name='fill')
    out = UOp.buffer('PYTHON', (8,), f32)
    with pytest.raises(RuntimeError, match="variable rows has no value in kernel fill.*bind"): run_linear(linear(ast.call(out)))
    assert buffer_of(out).memory is None
    with pytest.raises(ValueError, match='bind of rows to 9: wanted 1..8'): run_linear(linear(ast.call(out)), {'rows': 9})
    with pytest.raises(RuntimeError, match='rows'): run_linear(linear(ast.call(UOp.buffer('NULL', (8,), f32))))

def test_M10_a_value_scheduled_and_never_run():
    out, x = UOp.buffer('PYTHON', (4,), f32), filled('PYTHON', np.zeros(4, np.float32))
    first = mark_pending(linear(plus_one().call(out, x)))
    assert buffer_of(out).pending
    with pytest.raises(RuntimeError, match='never run'): read(out)
    with pytest.raises(RuntimeError, match='never run'): run_linear(linear(plus_one().call(x, out)))
    run_linear(first)
    assert (read(out) == 1).all() and not buffer_of(out).pending

def test_M10_a_schedule_may_read_what_it_will_overwrite():
    x = filled('PYTHON', np.zeros(4, np.float32))
    i = loop(4, 0)
    up = kernel(param(0, 4).index(i).store(add(param(0, 4).index(i), c(1.0, f32))).end(i))
    one, two = linear(up.call(x)), linear(up.call(x), up.call(x))
    mark_pending(one), mark_pending(two)
    with pytest.raises(RuntimeError, match='never run'): read(x)
    run_linear(one)
    run_linear(two)
    assert (read(x) == 3).all()

def test_M10_a_whole_new_value_makes_the_old_promise_void():
    x = filled('PYTHON', np.zeros(4, np.float32))
    mark_pending(linear(plus_one().call(x, filled('PYTHON', rnd(4)))))
    run_linear(linear(plus_one().call(x, filled('PYTHON', np.ones(4, np.float32)))))
    assert (read(x) == 2).all()

def test_no_memory_loses_nothing(monkeypatch):
    x, y, z = filled('PYTHON', rnd(4)), UOp.buffer('PYTHON', (4,), f32), UOp.buffer('PYTHON:1', (4,), f32)
    def nothing_left(self, nbytes):
        if self.name == 'PYTHON:1': raise MemoryError
        return allocate(self, nbytes)
    allocate = HostMemory.allocate
    monkeypatch.setattr(HostMemory, 'allocate', nothing_left)
    before, used = read(x), GlobalCounters.mem_used
    move = UOp.param(0, f32, (4,)).store(UOp.param(1, f32, (4,)))
    with pytest.raises(MemoryError, match='nothing was run'):
        run_linear(linear(plus_one().call(y, x), plus_one().call(x, y), move.call(z, x)))
    assert (read(x) == before).all() and buffer_of(y).memory is None and GlobalCounters.mem_used == used

def test_L2_debug_prints_kernels_and_source(capsys):
    lin = linear(plus_one().replace(arg=KernelInfo('plus_one')).call(UOp.buffer('PYTHON', (4,), f32), filled('PYTHON', rnd(4))))
    run_linear(lin)
    assert capsys.readouterr().out == ''
    with Context(DEBUG=2): run_linear(lin)
    said = capsys.readouterr().out
    assert said.count('\n') == 1 and all(w in said for w in ('PYTHON', 'GFLOPS', 'GB/s', ' ms'))
    with Context(DEBUG=4): run_linear(lin)
    assert 'INDEX' in capsys.readouterr().out

@pytest.mark.skipif('CPU' not in ALL, reason='no C compiler')
def test_L2_one_kernel_has_one_name(capsys):
    lin = linear(plus_one().replace(arg=KernelInfo('r_2')).call(UOp.buffer('CPU', (4,), f32), filled('CPU', rnd(4))))
    with Context(DEBUG=5): run_linear(lin)
    said = capsys.readouterr().out
    name = said.split('GFLOPS')[0].splitlines()[-1].split()[1]
    assert f'void {name}(' in said and 'SINK' in said

@pytest.mark.parametrize('command, why', [('no-such-cc -O0', 'no-such-cc -O0'), ('"gcc', '"gcc'), ('false', 'exit code 1'), ('true', 'exit code 0')])
def test_a_useless_compiler_lets_others_take_over(monkeypatch, capsys, tmp_path, command, why):
    from tinysched.runtime.device import Devices
    monkeypatch.setenv('CC', command)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setitem(KINDS, 'CL', NoDriver)
    with Context(DEV=''): assert Devices().DEFAULT == 'PYTHON'
    said = capsys.readouterr().err
    assert said.count('\n') == 1 and why in said and 'install PoCL' in said and not list(tmp_path.iterdir())

def test_L3_counters_and_profile_marks():
    lin = linear(plus_one().call(UOp.buffer('PYTHON', (4,), f32), filled('PYTHON', rnd(4))))
    GlobalCounters.reset()
    run_linear(lin)
    assert (GlobalCounters.kernel_count, GlobalCounters.global_ops, GlobalCounters.global_mem) == (1, 4, 32)
    assert GlobalCounters.time_sum_s > 0
    profile_events.clear()
    with Context(PROFILE=1): run_linear(lin)
    assert any(e.name.startswith('run ') for e in profile_events)

def test_equal_kernels_compile_once(monkeypatch):
    asked = []
    compile_ = type(Device['PYTHON']).compile
    monkeypatch.setattr(type(Device['PYTHON']), 'compile', lambda self, asts: asked.append(len(asts)) or compile_(self, asts))
    k1, k2 = elementwise(lambda x: mul(x, c(1017.5, f32)), 4, f32), elementwise(lambda x: mul(x, c(1018.5, f32)), 4, f32)
    a, b, d = (filled('PYTHON', rnd(4)) for _ in range(3))
    lin = linear(k1.call(a, b), k2.call(b, d), k1.call(d, a))
    assert compile_linear(lin) is lin
    run_linear(lin)
    assert asked == [2]

@on_all
def test_two_threads_at_once(device):
    x = rnd(64)
    def go(out):
        for n in range(20):
            ast = elementwise(lambda v, n=n: add(v, c(float(n), f32)), 64, f32)
            out.append(abs(run(device, ast, np.zeros(64, np.float32), x) - (x + np.float32(n))).max())
    outs = [[], []]
    threads = [threading.Thread(target=go, args=(o,)) for o in outs]
    for t in threads: t.start()
    for t in threads: t.join()
    assert all(len(o) == 20 and max(o) == 0 for o in outs)

# ---- OpenCL in other processes -----------------------------------------------------------------------------
PROGRAM = '''
import sys; sys.path.insert(0, {tests!r})
from test_runtime import *
assert (run('CL', plus_one(100), np.zeros(100, np.float32), np.ones(100, np.float32)) == 2).all()
'''

def in_process(home, **env):
    "What a fresh process that runs one OpenCL kernel says on the error channel"
    import os, pathlib, subprocess, sys
    env = {k: v for k, v in os.environ.items() if k != 'POCL_CACHE_DIR'} | dict(XDG_CACHE_HOME=str(home)) | env
    code = PROGRAM.format(tests=str(pathlib.Path(__file__).parent))
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr

@pytest.mark.skipif('CL' not in ALL, reason='no OpenCL here')
def test_C3_opencl_kernels_are_kept_sealed(tmp_path):
    in_process(tmp_path, CCACHE='0')
    assert list(tmp_path.iterdir()) == []          # off: no read, no write, no folder
    assert in_process(tmp_path) == ''
    kept, = (tmp_path / 'tinysched' / 'opencl').iterdir()
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    assert 'is damaged' in in_process(tmp_path)    # and written anew
    assert in_process(tmp_path) == ''

def test_no_driver_is_one_sentence(monkeypatch):
    from types import SimpleNamespace

    from tinysched.runtime import opencl
    class Error(Exception): pass
    def get_platforms(): raise Error('clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR')
    with pytest.raises(Unavailable, match='PLATFORM_NOT_FOUND_KHR.*pyopencl.pocl'):
        opencl.drivers(SimpleNamespace(Error=Error, get_platforms=get_platforms))

# ---- every operation on edge values: the devices agree with the interpreter -----------------------------------
def edges(dt):
    "24 values of a type that tend to make trouble"
    if dt is dtypes.bool: return np.array([0, 1] * 12, bool)
    if dt.kind == 'float':
        values = [0, -0.0, 1, -1, 2.5, -2.5, np.nan, np.inf, -np.inf, 1e-3, 1e5, -1e5, 3.7e9, -3.7e9, 1e19, -1e19,
                  1.8446744e19, 255.5, 65504, 1e-30, 7, -7, 3, 0.5]
        return np.array(values, np.float64 if dt is dtypes.float64 else np.float32)
    low, high = dt.min, dt.max
    return np.array([0, 1, 2, 3, 7, 8, 15, 31, 32, 63, 64, 100, 127, high, high - 1, low, low + 1, high // 2,
                     low or 5, 13, 17, min(high, 100), 9, 11], dt.name)

def operations(dt):
    "(name, value of the sources, types of the sources) of all that can be done with a type"
    from tinysched.ir.vocabulary import GroupOp
    real, flag = dt.kind == 'float', dt is dtypes.bool
    for op in sorted(GroupOp.Unary):
        if not flag and (real or op is Ops.NEG): yield op.name, lambda x, op=op: UOp(op, dt, (x,)), (dt,)
    bits, division = (Ops.AND, Ops.OR, Ops.XOR), (Ops.IDIV, Ops.MOD, Ops.SHL, Ops.SHR)
    for op in sorted(GroupOp.Binary):
        if (real and op in bits + division) or (op is Ops.FDIV and not real): continue
        if not (flag and op in (*division, Ops.SUB)): yield op.name, lambda x, y, op=op: bi(op, x, y), (dt, dt)
    yield 'WHERE', lambda q, x, y: UOp(Ops.WHERE, dt, (q, x, y)), (dtypes.bool, dt, dt)
    for to in dtypes.all:
        if to is dt: continue
        yield f'CAST {to.name}', lambda x, to=to: UOp(Ops.CAST, to, (x,)), (dt,)
        if to.itemsize == dt.itemsize and not flag and to is not dtypes.bool:
            yield f'BITCAST {to.name}', lambda x, to=to: UOp(Ops.BITCAST, to, (x,)), (dt,)

def arguments_of(dts):
    "Arrays in which every value of the last type meets every value of the one before"
    if len(dts) == 1: return [np.resize(edges(dts[0]), 576)]
    return [np.resize(edges(dts[0]), 576)][:len(dts) - 2] + [np.repeat(edges(dts[-2]), 24), np.tile(edges(dts[-1]), 24)]

def results(device, cases):
    "The values of all cases on a device"
    outs, calls = [], []
    for _, fn, dts in cases:
        ast = elementwise(fn, 576, *dts)
        outs.append(UOp.buffer(device, (576,), ast.src[0].src[0].src[0].dtype))
        with np.errstate(all='ignore'): ins = [filled(device, a, dt) for a, dt in zip(arguments_of(dts), dts)]
        calls.append(ast.call(outs[-1], *ins))
    run_linear(linear(*calls))
    return outs

FEW = [dtypes.float32, dtypes.int32, dtypes.uint8]
TOLERANCE = {dtypes.float64: 1e-12, dtypes.float32: 3e-6, dtypes.float16: 2e-3, dtypes.bfloat16: 2e-2}

@pytest.mark.parametrize('device,dt', [(d, dt) for d in ALL[1:] for dt in (FEW if d == 'CL' else dtypes.all)])
def test_devices_agree_on_edge_values(device, dt):
    cases = list(operations(dt))
    for (name, _, _), want, got in zip(cases, results('PYTHON', cases), results(device, cases)):
        a, b = read(want), read(got)
        same = (a == b) | ((a != a) & (b != b))
        if name in ('EXP2', 'LOG2', 'SIN', 'SQRT'):
            with np.errstate(all='ignore'): same |= np.isclose(a, b, rtol=TOLERANCE[dt], atol=1e-30)
        assert same.all(), (name, a[~same][:3], b[~same][:3])


def test_M10_a_younger_promise_stops_nobody():
    "Two schedules are made, the second overwrites what the first reads; they run in their order"
    x = Tensor([1, 2], device='PYTHON').contiguous().realize()
    y = x + 10
    first = y.schedule_linear()
    second = x.assign(x * 2).schedule_linear()
    run_linear(first); run_linear(second)
    assert (y.tolist(), x.tolist()) == ([11, 12], [2, 4])


@on_all
def test_padded_copies(device):
    "gcc 12 gets one of twenty of these wrong if it may thread jumps"
    rng, cases = np.random.default_rng(0), []
    for _ in range(80 if device == 'CPU' else 12):
        a = rng.integers(1, 99, rng.integers(1, 6, 2)).astype(np.int32)
        pads = tuple(map(tuple, rng.integers(0, 4, (2, 2)).tolist()))
        cases.append((Tensor(a, device=device).pad(pads).contiguous(), np.pad(a, pads)))
    Tensor.realize(*(t for t, _ in cases))
    for t, expected in cases: np.testing.assert_array_equal(t.numpy(), expected)


def test_loads_in_the_branches_of_conditions_are_not_merged_under_one_mask():
    "gcc 12 merges three such loads of a loop into one masked load, with the wrong mask"
    r = np.random.default_rng(0)
    for n in range(2, 9):
        x, w, g = (Tensor(r.standard_normal((n, 3)).astype(np.float32), device='CPU').realize() for _ in range(3))
        got = ((x @ w[:3].pad(((0, max(0, 3 - n)), (0, 0)))[:3].T) < 0).where(0, g).numpy()
        full = np.zeros((3, 3), np.float32)
        full[:min(n, 3)] = w.numpy()[:3]
        np.testing.assert_array_equal(got, np.where(x.numpy() @ full.T < 0, 0, g.numpy()))
