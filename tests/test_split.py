"Long reductions to few outputs are made in two kernels where workers can share the first (D6)"
import numpy as np
import pytest

from tinysched import Tensor, Variable, dtypes
from tinysched.helpers import Context
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import Ops
from tinysched.schedule.callify import Limits, transform_to_call
from tinysched.schedule.pipeline import lower_flat
from tinysched.schedule.prepare import parts_for, prepare, split_axis
from tinysched.schedule.rangeify import default_policy, rangeify

MANY = Limits(workers=8)


def buffer(*shape): return UOp.buffer('NULL', shape, dtypes.float32)


def program(value):
    out = UOp.buffer('NULL', value.shape, value.dtype)
    return transform_to_call(UOp.sink(out.after(out.store(value)))).src[0]


def kernels(value, limits=MANY, policy=default_policy):
    return len(lower_flat(program(value), limits, policy).src)


def test_D6_a_million_is_split_and_65536_are_not():
    assert kernels(buffer(1_000_000).sum()) == 2
    assert kernels(buffer(1000, 1000).sum()) == 2
    assert kernels(buffer(65_536).sum()) == 1
    assert kernels(buffer(256, 256).sum()) == 1


def test_D6_at_most_256_partial_results():
    linear = lower_flat(program(buffer(1 << 22).sum()), MANY)
    first = linear.src[0]
    assert [r.vmax + 1 for r in first.src[0].src[0].src[1:]] == [256]
    assert all(16 <= k <= 256 for n in range(16, 3000) if (k := parts_for(n)))
    four = lower_flat(program(buffer(4, 1 << 20).max(1)), MANY).src[0]
    assert sorted(r.vmax + 1 for r in four.src[0].src[0].src[1:]) == [4, 64]


def test_D6_one_worker_needs_no_parts():
    assert kernels(buffer(1_000_000).sum(), Limits(workers=1)) == 1


def test_D6_the_setting_says_when():
    with Context(SPLIT_REDUCE=0): assert kernels(buffer(1 << 24).sum()) == 1
    with Context(SPLIT_REDUCE=1 << 10): assert kernels(buffer(2048).sum()) == 2


def test_D6_the_setting_is_part_of_the_key():
    x = Tensor.empty(1 << 20, device='CPU')
    counts = []
    for most in (0, 1 << 19, 0):
        with Context(SPLIT_REDUCE=most): counts.append(len(x.sum().schedule_linear().src))
    assert counts[0] == counts[2] == 1


def test_D6_many_outputs_are_left_alone():
    assert kernels(buffer(64, 1 << 16).sum(1)) == 1
    assert kernels(buffer(4, 1 << 20).max(1)) == 2


def test_D6_symbolic_reductions_are_left_alone():
    n = Variable('n', 1, 1 << 20).bind(1 << 20)
    assert kernels(buffer(1 << 20).shrink(((0, n),)).sum()) == 1


def test_D6_values_without_memory_and_masks_are_left_alone():
    place = Tensor.arange(1 << 20, device='CPU')
    assert len((place.eq(5).where(place * 3, 0).sum()).schedule_linear().src) <= 1
    w = Tensor.empty(1 << 20, device='CPU')
    chosen, alone = w[Tensor([7], device='CPU').realize()], place.float().sum()
    axes = lambda t: [split_axis(u) for u in t.uop.toposort() if u.op is Ops.REDUCE]
    assert (axes(w.sum()), axes(chosen), axes(alone)) == ([(0, 256)], [None], [None])
    assert len(chosen.schedule_linear().src) == 1


def test_D6_the_decision_has_a_reason_and_can_be_flipped():
    value = buffer(1_000_000).sum()
    plan = rangeify(prepare(program(value), MANY), MANY)
    found = [root.reason for root in plan.roots.values()]
    assert [r.rule for r in found] == ['A1', 'D6'] and '250 partial results' in str(found[1])
    assert found[1].stored_bytes == 1000
    never = lambda site: None if (r := default_policy(site)) and r.rule == 'D6' else r
    assert kernels(value, policy=never) == 1


@pytest.mark.parametrize('shape, axis', [((1 << 20,), None), ((1000, 1000), None), ((3, 400_000), 1),
                                         ((400_000, 3), 0), ((2, 500, 1000), (1, 2)), ((999_983,), None)])
@pytest.mark.parametrize('device', ['CPU', 'PYTHON'])
def test_D6_results_are_the_same(shape, axis, device):
    "Exactly for max and argmax, within rounding for sums of floats"
    with Context(SPLIT_REDUCE=1 << 16):
        a = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        t = Tensor(a, device=device).realize()
        exact = a.sum(axis, dtype=np.float64)
        np.testing.assert_allclose(t.sum(axis).numpy(), exact, atol=1e-5 * a.size ** .5, rtol=1e-5)
        np.testing.assert_array_equal(t.max(axis).numpy(), a.max(axis))
        if not isinstance(axis, tuple):
            np.testing.assert_array_equal(t.argmax(axis).numpy(), a.argmax(axis))


def test_D6_partial_sums_round_less():
    "Parts are added apart, so a small number does not meet a sum of all those before it"
    a = np.full(1 << 22, 0.1, np.float32)
    t = Tensor(a, device='CPU').realize()
    errors = []
    for most in (0, 1 << 19):
        with Context(SPLIT_REDUCE=most): errors.append(abs(t.sum().item() - a.sum(dtype=np.float64)))
    assert errors[1] <= errors[0]


def test_D6_integers_and_means():
    a = np.random.default_rng(2).integers(-9, 9, (1 << 20,)).astype(np.int32)
    t = Tensor(a, device='CPU').realize()
    assert t.sum().item() == a.sum() and abs(t.mean().item() - a.mean()) < 1e-6
    assert [u.op for u in program(buffer(1 << 20).sum()).toposort()].count(Ops.REDUCE) == 1
