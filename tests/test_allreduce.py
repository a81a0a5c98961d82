"""All-reduce and other transfers between devices: J2, J4, J5 on graphs, and runs on PYTHON devices (chapter 13)."""
import numpy as np
import pytest

from tinysched import Context, GlobalCounters, Tensor, sched_stats
from tinysched.ir.dtype import dtypes
from tinysched.ir.spec import state_of
from tinysched.ir.uop import Sharding, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime.device import pieces_of
from tinysched.schedule.memory import each_device, memory_plan_rewrite, plan
from tinysched.schedule.multi import STEP, communicated, device_index, multi, numbers, ring_pays
from tinysched.schedule.pipeline import lower_flat

SIZES = (0, 1, 2, 3, 7, 8, 1000)
COUNTS = (2, 3, 4, 5, 8)


def names(n: int) -> tuple[str, ...]:
    "So many devices"
    return tuple(f'PYTHON:{i}' for i in range(n))


def values(n: int, size: int, dtype: str) -> np.ndarray:
    "Small whole numbers, a row for each device, so that every order of adding gives the same"
    return np.random.default_rng(size).integers(0, 2 if dtype == 'bool' else 4, (n, size)).astype(dtype)


def reduced(rows: np.ndarray, op: str, ring: int) -> list[np.ndarray]:
    "The rows of as many devices, joined by an all-reduce: what each device then holds"
    with Context(RING=ring):
        out = getattr(Tensor(rows).shard(names(len(rows)), 0).realize(), op)(0).realize()
    if not rows.size: return [out.numpy()]
    return [b.numpy() for b in pieces_of(out.uop.storage)]


@pytest.mark.parametrize('ring', (0, 2))
@pytest.mark.parametrize('n', COUNTS)
def test_J4_any_number_of_devices_and_any_size(n, ring):
    for size in SIZES:
        rows = values(n, size, 'float32')
        for piece in reduced(rows, 'sum', ring): np.testing.assert_array_equal(piece, rows.sum(0))


@pytest.mark.parametrize('ring', (0, 2))
@pytest.mark.parametrize('op', ('sum', 'max', 'prod'))
@pytest.mark.parametrize('dtype', ('float16', 'int32', 'bool'))
def test_J4_sum_product_maximum_of_any_dtype(dtype, op, ring):
    if (op, dtype) == ('prod', 'bool'): op = 'min'    # also a product, of bits
    for n, size in ((3, 0), (2, 1), (4, 7), (3, 9)):
        rows = values(n, size, dtype)
        if not size and op == 'min': continue
        for piece in reduced(rows, op, ring): np.testing.assert_array_equal(piece, getattr(rows, op)(0))


@pytest.mark.parametrize('dtype', ('float32', 'float16'))
@pytest.mark.parametrize('n', COUNTS)
def test_J4_devices_agree_to_the_bit(n, dtype):
    for size in (1, 7, 64):
        rows = np.random.default_rng(n).standard_normal((n, size)).astype(dtype)
        for ring in (0, 2):
            first, *others = reduced(rows, 'sum', ring)
            for piece in others: assert piece.tobytes() == first.tobytes()
            np.testing.assert_allclose(first, rows.astype('float64').sum(0), atol=1e-2 if dtype == 'float16' else 1e-5)


def test_J4_naive_adds_in_the_order_of_devices():
    rows = np.random.default_rng(0).standard_normal((5, 100)).astype('float32')
    want = rows[0]
    for row in rows[1:]: want = want + row
    for piece in reduced(rows, 'sum', 0): assert piece.tobytes() == want.tobytes()


def test_J4_ring_adds_each_chunk_on_its_way_around():
    rows = np.random.default_rng(0).standard_normal((4, 8)).astype('float32')
    chunks = []
    for k in range(4):    # begins on the device after number k, ends on device k
        part = rows[:, 2 * k:2 * k + 2]
        total = part[(k + 1) % 4]
        for step in (2, 3, 4): total = total + part[(k + step) % 4]
        chunks.append(total)
    want = np.concatenate(chunks)
    for piece in reduced(rows, 'sum', 2): assert piece.tobytes() == want.tobytes()


def test_J4_threshold_is_where_the_bytes_are_equal():
    for n in range(3, 9):
        equal = STEP * (2 * (n - 1) - 1) * n / ((n - 1) * (n - 2))   # 2(n-1) (S + B/n) = S + (n-1) B
        assert ring_pays(int(equal * 1.001), n) and not ring_pays(int(equal * 0.999), n)
    assert not ring_pays(1 << 40, 2)    # two devices: as many bytes, in two steps instead of one


def counts(linear: UOp) -> tuple[int, int, int]:
    "Kernels, copies and temporaries of a schedule"
    stats = sched_stats(linear)
    named = {a.storage for c in linear.src for a in c.src[1:]}
    return stats['kernels'], stats['copies'], sum(s is not None and s.op is Ops.ALLOC for s in named)


@pytest.mark.parametrize('n, kb', [(3, 1153), (4, 854)])    # from where on a ring pays
@pytest.mark.parametrize('setting', (0, 1, 2))
def test_J4_the_setting_forbids_allows_and_demands_a_ring(setting, n, kb):
    for size, pays in (((kb - 1) << 8, False), (kb << 8, True)):
        with Context(RING=setting): linear = lower_flat(stored(sharded((n, size), 0, n).sum(0)))
        goes_around = setting == 2 or setting == 1 and pays
        assert counts(linear)[1] == n * (n - 1) * (2 if goes_around else 1)
        received = (n - 1) * 4 * (2 * -(-size // n) if goes_around else size)
        assert communicated(linear) == dict.fromkeys(names(n), received)


def kernels(t: Tensor) -> int:
    "How many calls computing a value takes"
    return len(t.schedule_linear().src)


@pytest.mark.parametrize('axis, view, calls', [
    (0, lambda t: t.reshape(2, 2, 12), 0), (1, lambda t: t.reshape(4, 2, 6), 0), (1, lambda t: t[1:3], 0),
    (1, lambda t: t[2], 0), (0, lambda t: t[:, 2:9], 1), (0, lambda t: t.T, 1), (1, lambda t: t.T, 1), (0, lambda t: t[:, 0], 1)])
def test_A9_view_of_a_split_value_is_shared_part_by_part(axis, view, calls):
    a = np.arange(48, dtype='float32').reshape(4, 12)
    x = Tensor(a).shard(names(2), axis).realize()
    assert kernels(view(x).contiguous()) == calls
    y = view(x).contiguous()
    np.testing.assert_array_equal(y.numpy(), view(a))
    assert y.uop.axis is not None
    x += 1
    np.testing.assert_array_equal(x.numpy(), a + 1)
    np.testing.assert_array_equal(y.numpy(), view(a))    # M5: a snapshot, however it is stored


def test_A9_view_of_a_split_value_is_read_without_a_kernel():
    a = np.arange(48, dtype='float32').reshape(4, 12)
    x = Tensor(a).shard(names(2), 1).realize()
    before = GlobalCounters.kernel_count
    np.testing.assert_array_equal(x[1:3].numpy(), a[1:3])
    assert GlobalCounters.kernel_count == before


N = 4


def split(shape: tuple, axis: int | None, dtype: str = 'float32') -> Tensor:
    "Small whole numbers on four devices"
    return Tensor((np.arange(np.prod(shape)) % 7).reshape(shape).astype(dtype)).shard(names(N), axis).realize()


def bytes_received(*values: Tensor) -> set[int]:
    "Bytes that devices receive while values are computed; all the same, or several numbers"
    return set(communicated(values[0].schedule_linear(*values[1:])).values()) or {0}


A, B, C = 8 * 16 * 4, 16 * 32 * 4, 8 * 32 * 4    # bytes of the operands and of the result of a matmul


@pytest.mark.parametrize('a, b, gathered, ring, axis', [
    (0, 0, (N - 1) * A // N**2, 1, None),   # rows against rows: a is dealt out anew, as its columns are wanted
    (0, 1, (N - 1) * A // N, 0, 1),         # the last operand's axis wins: a is gathered
    (0, None, 0, 0, 0), (None, 1, 0, 0, 1), (None, None, 0, 0, None),
    (1, 0, 0, 1, None), (1, None, 0, 1, None), (None, 0, 0, 1, None),
    (1, 1, (N - 1) * A // N, 0, 1)])
def test_J5_matmul_communicates_what_the_textbook_says(a, b, gathered, ring, axis):
    for setting, reduced in ((0, (N - 1) * C), (2, 2 * (N - 1) * C // N)):
        with Context(RING=setting):
            y = split((8, 16), a) @ split((16, 32), b)
            assert y.uop.axis == axis
            assert bytes_received(y) == {gathered + ring * reduced}
            np.testing.assert_array_equal((split((8, 16), a) @ split((16, 32), b)).numpy(),
                                          split((8, 16), None).numpy() @ split((16, 32), None).numpy())


ROWS = 8 * 4     # bytes of a number for each row


@pytest.mark.parametrize('name, value, wanted', [
    ('elementwise', lambda: split((8, 16), 0) + split((8, 16), 0), 0),
    ('elementwise, whole operand', lambda: split((8, 16), 0) + split((8, 16), None), 0),
    ('elementwise, split across', lambda: split((8, 16), 0) + split((8, 16), 1), (N - 1) * A // N**2),
    ('softmax over rows', lambda: split((8, 16), 0).softmax(1), 0),
    ('softmax over features', lambda: split((8, 16), 1).softmax(1), 2 * (N - 1) * ROWS),
    ('convolution of a batch', lambda: split((8, 3, 6, 6), 0).conv2d(split((4, 3, 3, 3), None)), 0),
    ('resharding', lambda: split((8, 16), 0).shard(names(N), 1), (N - 1) * A // N**2),
    ('flip of the split axis', lambda: split((8, 16), 0).flip(0) + 1, (N - 1) * A // N),
    ('one shard', lambda: split((8, 16), 0)[2:4] + 1, A // N),
    ('sum of all', lambda: split((8, 16), 0).sum(), (N - 1) * 4),
    ('gather on one', lambda: split((8, 16), 0).to('PYTHON'), (N - 1) * A // N)], ids=lambda v: v if isinstance(v, str) else '')
def test_J5_no_more_is_copied_than_the_textbook_says(name, value, wanted):
    with Context(RING=0): assert bytes_received(value()) == {wanted}


def test_J5_a_slice_over_a_border_copies_only_what_it_shows():
    got = communicated((split((8, 16), 0)[1:6] + 1).schedule_linear())    # rows 1, 2-3, 4-5 of devices 0 to 2
    assert got == {'PYTHON': 4 * 64, 'PYTHON:1': 3 * 64, 'PYTHON:2': 3 * 64, 'PYTHON:3': 5 * 64}


@pytest.mark.parametrize('ring', (0, 2))
def test_J5_data_parallel_gradient_is_one_all_reduce_of_the_weight(ring):
    x, w = split((8, 16), 0), split((16, 32), None)
    w.requires_grad = True
    with Context(RING=ring):
        grad = (x @ w).relu().square().sum().gradient(w)[0]
        assert bytes_received(grad) == {2 * (N - 1) * B // N if ring else (N - 1) * B}


def test_J5_exchange_moves_stretches_without_a_kernel_for_each():
    linear = split((8, 16), 0).shard(names(N), 1).contiguous().schedule_linear()
    assert sum(c.src[0].op is not Ops.STORE for c in linear.src) == 2    # slabs on each, parts on each
    np.testing.assert_array_equal(split((8, 12), 0).shard(names(N), 1).numpy(), split((8, 12), None).numpy())


@pytest.mark.parametrize('to, received', [('PYTHON', {}), ('PYTHON:1', {}), ('PYTHON:5', {'PYTHON:5': A})])
def test_J5_a_device_that_has_all_of_a_value_receives_nothing(to, received):
    assert communicated(split((8, 16), None).to(to).schedule_linear()) == received


def test_J5_parts_move_to_other_devices_one_by_one():
    others = tuple(f'PYTHON:{i}' for i in range(N, 2 * N))
    linear = split((8, 16), 0).shard(others, 0).schedule_linear()
    assert counts(linear)[:2] == (0, N) and communicated(linear) == dict.fromkeys(others, A // N)


def test_J5_what_is_handed_to_each_and_kept_is_copied_once():
    x = Tensor(np.ones((8, 16), 'float32'), device='PYTHON').realize()
    for axis in (None, 0):
        y = x.shard(names(N), axis)
        linear = Tensor.schedule_linear(y, y + 1)
        assert counts(linear) == (2, N - 1, 0)    # one copy stays on its device; the sum reads what was copied


def sharded(shape: tuple, axis: int | None, n: int = 3, slot: int = 1) -> UOp:
    "An argument that several devices hold"
    return UOp.param(slot, dtypes.float32, shape, Sharding(names(n), axis))


def stored(value: UOp) -> UOp:
    "SINK of a program that stores a value in an argument"
    out = UOp.param(0, value.dtype, value.shape, value.device)
    return out.after(out.store(value)).sink()


def ops(u: UOp) -> list[str]:
    "Names of the operations of a graph"
    return [n.op.name for n in u.toposort()]


def test_J2_operations_rise_to_the_parts():
    x, y = sharded((6, 4), 0), sharded((6, 4), 0, slot=2)
    graph = multi(stored((x + y).exp2()))
    assert not {'UNSHARD', 'COPY', 'MSTACK', 'MSELECT'} & set(ops(graph))
    assert {u.shape for u in graph.toposort() if u.op in (Ops.PARAM, Ops.ADD)} == {(2, 4)}


def brought_to(x: UOp, place) -> UOp:
    "A value on other devices"
    return UOp(Ops.COPY, x.dtype, (x,), place)


def test_J5_parts_are_received_where_they_belong():
    x = sharded((6, 4), 0)
    assert counts(lower_flat(stored(brought_to(x, 'PYTHON') + 1))) == (1, 3, 1)    # the sum, from one temporary
    assert counts(lower_flat(stored(brought_to(x, Sharding(names(3))) + 1))) == (2, 3 * 2, 1)   # and each device's own part


def test_A4_a_gather_goes_straight_into_what_it_is_stored_in():
    x = sharded((6, 4), 0)
    assert counts(lower_flat(stored(brought_to(x, 'PYTHON')))) == (0, 3, 0)
    assert counts(lower_flat(stored(brought_to(x, Sharding(names(3)))))) == (1, 3 * 2, 0)    # each device's own part


def test_A4_a_gather_goes_into_what_its_parts_were_made_of():
    a = split((8, 16), None).numpy()
    for made, want in ((lambda x: x * 2, a * 2), (lambda x: x.flip(0) + x, a[::-1] + a), (lambda x: x + x.sum(0), a + a.sum(0))):
        y = split((8, 16), None)
        old = y + 1
        y.assign(made(y.shard(names(N), 0)).shard(names(N)))
        y.realize()
        for piece in pieces_of(y.uop.storage): np.testing.assert_array_equal(piece.numpy(), want.reshape(-1))
        np.testing.assert_array_equal(old.numpy(), a + 1)
    y = split((8, 16), None)
    y.assign((y.shard(names(N), 0) * 2).shard(names(N)))
    assert counts(y.schedule_linear()) == (1, N * (N - 1), 0)


def test_J2_reduce_over_the_split_axis_is_an_allreduce():
    x = sharded((6, 4), 0)
    with Context(RING=0): names_of = ops(multi(stored(x.sum(0))))
    assert names_of.count('COPY') == 3 * 2 and 'ALLREDUCE' not in names_of
    assert 'COPY' not in ops(multi(stored(x.sum(1))))


@pytest.mark.parametrize('ring', (0, 2))
def test_J7_copies_grow_with_devices_and_kernels_stay(ring):
    bodies = []
    for n in (3, 4, 8):
        with Context(RING=ring): linear = lower_flat(stored(sharded((n, 24 * n), 0, n).sum(0)))
        found = [c.src[0] for c in linear.src]
        copies = sum(b.op is Ops.STORE for b in found)
        assert copies == (2 * n * (n - 1) if ring else n * (n - 1))
        bodies.append(len({b for b in found if b.op is not Ops.STORE}))
    assert len(set(bodies)) == 1 and bodies[0] == (3 if ring else 2)   # partial sums; a step, the last step


def test_D1_a_program_of_single_devices_is_left_alone():
    x = UOp.param(1, dtypes.float32, (4,), 'CPU')
    sink = stored(x + 1)
    assert multi(sink) is sink
    out = UOp.param(0, dtypes.float32, (4,), 'CL')
    copy = out.after(out.store(UOp(Ops.COPY, x.dtype, (x,), 'CL'))).sink()
    assert multi(copy) is copy


def test_D1_no_node_of_the_result_is_split():
    x, y = sharded((6, 6), 0), sharded((6, 6), 1, slot=2)
    for value in (x + y, (x * y).sum(0), x.flip(0) + x, x.transpose(0, 1) @ x):
        graph = multi(stored(value)).toposort()
        assert not any(isinstance(u.device, Sharding) and u.axis is not None for u in graph)
        assert not {Ops.UNSHARD, Ops.ALLREDUCE} & {u.op for u in graph}


def test_J3_the_last_operands_axis_wins():
    x, y, z = sharded((6, 6), 0), sharded((6, 6), 1, slot=2), sharded((6, 6), None, slot=3)
    assert [u.axis for u in (x + y, y + x, x + z, z + y, x + y + x)] == [0 if u is x else 1 for u in (y, x, x, y, x)]
    out = multi(stored(x + y)).src[0].src[1]
    assert out.src[1].op is Ops.ADD and out.src[1].src[1].op is Ops.PARAM    # y stays where it is


def test_J4_numbers_go_around():
    assert [numbers(i, 3)[device_index(3, 1)] for i in range(3)] == [2, 0, 1]


def test_K7_each_device_has_its_own_arena():
    with Context(RING=2): linear = lower_flat(stored(sharded((4, 1000), 0, 4).sum(0) * 2))
    arenas = {state_of(u) for c in linear.src for u in c.src[1:] if u.storage is not None and u.storage.op is Ops.ALLOC}
    places = {u.storage.device for u in arenas if u.dtype is dtypes.uint8}
    assert Sharding(names(4)) in places and set(names(4)) <= places


def test_K7_the_picture_has_a_chart_for_each_device():
    with Context(RING=2, NO_MEMORY_PLANNER=1):
        linear = lower_flat(stored(sharded((4, 1000), 0, 4).sum(0) * 2))
    charts = each_device(plan(linear, 256, ()))
    assert set(charts) == set(names(4))
    after = memory_plan_rewrite(linear).arg.tmp_after
    assert sum(a.peak for a in charts.values()) == after
    for a in charts.values(): assert len(repr(a.picture('x')).splitlines()) == 1 + len(a.at)


def test_K3_what_is_sent_and_received_is_in_the_lane_of_copies():
    with Context(RING=2, NO_MEMORY_PLANNER=1):
        linear = lower_flat(stored(sharded((4, 1000), 0, 4).sum(0) * 2))
    lanes = plan(linear, 256, ())
    touched = {m.storage for c in linear.src if c.src[0].op is Ops.STORE for m in c.src[1:]}
    for (_, lane), arena in lanes.items():
        for b in arena.at: assert (b in touched) is (lane == 'copies')
