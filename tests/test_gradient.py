"""Gradients: every rule against finite differences in float64, what assignment means for them, and what is refused."""
import os

import numpy as np
import pytest

from tinysched import Tensor, UOp, compute_gradient, dtypes
from tinysched.frontend.gradient import RULES, on_path, reached
from tinysched.ir.vocabulary import Ops
from tinysched.runtime.device import Device

DEVICES = [d for d in os.environ.get('TS_DEVICES', 'CPU,PYTHON').split(',') if not Device.failure(d)]
R = np.random.default_rng(42)
rnd = lambda *shape: R.uniform(0.5, 1.5, shape) * R.choice([-1, 1], shape)
on_each_device = pytest.mark.parametrize('device', DEVICES)


def numeric(f, arrays, h=1e-6):
    "Central differences of a function from tensors to one number"
    value = lambda arrays: f(*(Tensor(a, device='PYTHON') for a in arrays)).item()
    found = []
    for i, a in enumerate(arrays):
        out = np.zeros_like(a)
        for at in np.ndindex(a.shape):
            up, down = a.copy(), a.copy()
            up[at] += h
            down[at] -= h
            out[at] = (value([*arrays[:i], up, *arrays[i + 1:]]) - value([*arrays[:i], down, *arrays[i + 1:]])) / (2 * h)
        found.append(out)
    return found


def check(f, *arrays, device, tol=1e-5):
    ts = [Tensor(a, device=device) for a in arrays]
    found = f(*ts).gradient(*ts)
    Tensor.realize(*found)
    for g, want, t in zip(found, numeric(f, arrays), ts):
        assert g.dtype is t.dtype and g.shape == t.shape
        np.testing.assert_allclose(g.numpy(), want, rtol=tol, atol=tol)


COMPOSITES = {
    'softmax': (lambda x, y: (x.softmax(-1) * y).sum(), rnd(3, 4), rnd(3, 4)),
    'log_softmax': (lambda x, y: (x.log_softmax(0) * y).sum(), rnd(3, 4), rnd(3, 4)),
    'layer_norm': (lambda x, w: ((x - x.mean(-1, True)) * (x.var(-1, True) + 1e-5).rsqrt() * w).square().sum(), rnd(2, 5), rnd(5)),
    'matmul_bias_relu': (lambda x, w, b: (x @ w + b).relu().square().sum(), rnd(3, 4), rnd(4, 2), rnd(2)),
    'conv_pool': (lambda x, w: x.conv2d(w, padding=1).max_pool2d().square().sum(), rnd(1, 2, 4, 4), rnd(2, 2, 3, 3)),
    'conv_stride': (lambda x, w: x.conv2d(w, stride=2, dilation=2, groups=2).square().sum(), rnd(1, 2, 6, 6), rnd(2, 1, 2, 2)),
    'used_twice': (lambda x: (x * x.exp() + x.flip(0) * x).sum(), rnd(4)),
    'scalar_beside_array': (lambda x, s: (x * s + s * s).sum(), rnd(3, 2), rnd()),
    'slices': (lambda x: (x[1:, ::2] * x[:-1, 1::2]).sum(), rnd(3, 4)),
    'rows_picked': (lambda x: x[Tensor([2, 0, 2], device=x.device)].square().sum(), rnd(3, 2)),
    'product': (lambda x: (x.prod(1) * Tensor([1.0, 2.0], device=x.device).cast('float64')).sum(), rnd(2, 4)),
    'staged': (lambda x: (x.sin().contiguous() * x.contiguous_backward()).sum(), rnd(5)),
    'cat_stack': (lambda x, y: (x.cat(y, dim=1).square() * Tensor.stack(x, y).sum()).sum(), rnd(2, 2), rnd(2, 2)),
    'where': (lambda x, y: (x > 0).where(x * y, y / x).sum(), rnd(6), rnd(6)),
    'power': (lambda x, y: (x.abs() ** y).sum(), rnd(5), rnd(5)),
    'division': (lambda x, y: (x / y / y).sum(), rnd(5), rnd(5)),
    'pad': (lambda x: x.pad(((1, 2), (0, 1)), value=3.0).square().cumsum(0).square().sum(), rnd(2, 3)),
}


@on_each_device
@pytest.mark.parametrize('name', COMPOSITES)
def test_composite(name, device):
    f, *arrays = COMPOSITES[name]
    check(f, *(np.asarray(a) for a in arrays), device=device)


# ---- values worked out by hand

def grads(loss, *ts): return [g.tolist() for g in loss.gradient(*ts)]


@on_each_device
def test_product_with_zeros(device):
    x = Tensor([[2.0, 3.0, 4.0], [2.0, 0.0, 4.0], [0.0, 0.0, 4.0]], device=device)
    assert grads(x.prod(1).sum(), x) == [[[12, 8, 6], [0, 8, 0], [0, 0, 0]]]


@on_each_device
def test_ties_share(device):
    x, y = Tensor([1.0, 2.0, 2.0], device=device), Tensor([1.0, 0.0, 3.0], device=device)
    assert grads(x.max(), x) == [[0, 0.5, 0.5]]
    assert grads(x.maximum(y).sum(), x, y) == [[0.5, 1, 0], [0.5, 0, 1]]


def test_kinks_of_abs_and_relu():
    x = Tensor([-2.0, 0.0, 3.0], device='PYTHON')
    assert grads(x.abs().sum(), x) == [[-1, 0, 1]] and grads(x.relu().sum(), x) == [[0, 0, 1]]


def test_steps_are_level():
    x = Tensor([0.3, 1.7], device='PYTHON')
    assert grads((x.floor() * x).sum(), x) == [[0, 1]]


def test_nan_is_not_hidden():
    x = Tensor([float('nan'), 1.0], device='PYTHON')
    got = x.maximum(0.0).sum().gradient(x)[0].numpy()
    assert got.tolist() == [1, 1]


def test_second_derivative():
    x = Tensor([1.0, 2.0], device='PYTHON')
    (first,) = (x * x * x).sum().gradient(x)
    assert grads(first.sum(), x) == [[6, 12]]


def test_given_gradient():
    x = Tensor([1.0, 2.0], device='PYTHON')
    assert [g.tolist() for g in (x * x).gradient(x, gradient=Tensor([1.0, 10.0], device='PYTHON'))] == [[2, 40]]


# ---- dtypes and devices

@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32', 'float64'])
def test_gradient_has_the_dtype_of_the_value(dtype):
    x = Tensor([1.0, 2.0], device='PYTHON', dtype=dtype)
    y = Tensor([3.0, 4.0], device='PYTHON', dtype='float64')
    gx, gy = (x * y).sum().gradient(x, y)
    assert (gx.dtype, gy.dtype) == (x.dtype, y.dtype) and (gx.tolist(), gy.tolist()) == ([3, 4], [1, 2])


def test_integers_pass_no_gradient():
    x, n = Tensor([1.0, 2.0], device='PYTHON'), Tensor([3, 4], device='PYTHON')
    assert grads((x * n).sum(), x) == [[3, 4]]
    with pytest.raises(RuntimeError, match='target 0 is int32; only floats have one'): (x * n).sum().gradient(n)
    with pytest.raises(RuntimeError, match='gradient of int32: only floats'): n.sum().gradient(x)
    with pytest.raises(RuntimeError, match='nothing that has a derivative'): (x.cast('int32').cast('float32')).sum().gradient(x)


def test_copies_go_back():
    x = Tensor([1.0, 2.0], device='PYTHON').realize()
    g = (x.to('PYTHON:1') * 3).sum().gradient(x)[0]
    assert g.device == 'PYTHON' and g.tolist() == [3, 3]


# ---- what stops a gradient, and where it goes

def test_detach_stops():
    x = Tensor([1.0, 2.0], device='PYTHON')
    assert grads((x * x.detach()).sum(), x) == [[1, 2]]
    with pytest.raises(RuntimeError, match='target 0.*Try the very tensor'): x.detach().sum().gradient(x)


def test_a_target_that_is_not_read():
    x, y = Tensor([1.0], device='PYTHON'), Tensor([1.0, 2.0], device='PYTHON')
    with pytest.raises(RuntimeError, match=r'reads target 1, float32 of shape \(2,\), not at all'): x.sum().gradient(x, y)


def test_equal_constants_are_told_apart():
    a, b = Tensor(3.0, device='PYTHON'), Tensor.full((2,), 3.0, device='PYTHON')
    assert grads(a * 3.0 * a, a) == [18]
    c = Tensor.full((2,), 3.0, device='PYTHON')
    assert grads((b * c).sum(), b, c) == [[3, 3], [3, 3]]


def test_contiguous_backward_stores_the_gradient():
    x = UOp.buffer('PYTHON', (4,), dtypes.float32)
    loss = (UOp(Ops.CONTIGUOUS_BACKWARD, x.dtype, (x,)) * 2).sum()
    assert compute_gradient(loss, [x])[0].op is Ops.STAGE


def test_only_the_path_is_visited():
    x, y = (UOp.buffer('PYTHON', (4,), dtypes.float32) for _ in 'xy')
    heavy = y.exp().sin().exp()
    loss = (x * heavy).sum()
    path = on_path(reached(loss), {x})
    assert heavy not in path and x in path and len(path) == 4   # x, MUL, REDUCE, RESHAPE
    found = compute_gradient(loss, [x])[0]
    assert heavy in found.toposort() and not any(u.op is Ops.SIN for u in set(found.toposort()) - set(loss.toposort()))


def test_linear_in_depth():
    def nodes(n):
        x = u = UOp.buffer('PYTHON', (4,), dtypes.float32)
        for i in range(n): u = u * (1.0 + i) + x
        return len(compute_gradient(u.sum(), [x])[0].toposort())
    a, b, c = nodes(1000), nodes(2000), nodes(30_000)
    assert (b - a) * 28 == c - b


# ---- assignment (M9)

@on_each_device
def test_M9_gradient_through_a_write(device):
    x, y = Tensor([1.0, 2.0, 3.0], device=device, requires_grad=True), Tensor([5.0], device=device, requires_grad=True)
    x.realize()
    z = x * 2
    z[1:2] = y * 10
    assert grads((z * z).sum(), x, y) == [[8, 0, 24], [1000]]


@on_each_device
def test_M9_gradient_of_the_state_that_was_read(device):
    x = Tensor([1.0, 2.0], device=device, requires_grad=True).realize()
    loss = (x * x).sum()
    x.assign(x * 100)
    assert grads(loss, x) == [[2, 4]]
    assert x.tolist() == [100, 200]
    assert grads((x * x).sum(), x) == [[200, 400]]


def test_gradient_is_a_snapshot():
    x = Tensor([1.0, 2.0], device='PYTHON', requires_grad=True).realize()
    (x * x).sum().backward()
    x.assign(Tensor([7.0, 7.0], device='PYTHON')).realize()
    assert x.grad.tolist() == [2, 4]


# ---- backward

def test_backward_fills_and_accumulates():
    x, y, z = (Tensor([1.0, 2.0], device='PYTHON', requires_grad=r) for r in (True, None, True))
    for _ in range(2): (x * y).sum().backward()
    assert x.grad.tolist() == [2, 4] and y.grad is None and z.grad is None
    x.grad = None
    assert (x * 3).sum().backward().item() == 9 and x.grad.tolist() == [3, 3]


def test_two_models_with_one_seed_share_nothing():
    pair = []
    for _ in range(2):
        Tensor.manual_seed(3)
        pair.append(Tensor.rand(3, device='PYTHON', requires_grad=True))
    (pair[0] * 2).sum().backward()
    assert pair[0].grad.tolist() == [2, 2, 2] and pair[1].grad is None and pair[0].tolist() == pair[1].tolist()


def test_backward_refuses():
    x = Tensor([1.0, 2.0], device='PYTHON', requires_grad=True)
    with pytest.raises(RuntimeError, match=r'shape \(2,\) needs a weight'): (x * 2).backward()
    with pytest.raises(RuntimeError, match=r'gradient= has shape \(3,\); wanted \(2,\)'): (x * 2).backward(Tensor([1.0, 1.0, 1.0], device='PYTHON'))
    with pytest.raises(RuntimeError, match='no float tensor'): Tensor([1.0], device='PYTHON', requires_grad=False).sum().backward()
    with pytest.raises(RuntimeError, match='before realize'): (x * 2).sum().detach().backward()
    assert x.grad is None and x.tolist() == [1, 2]


def test_every_float_operation_has_a_rule():
    smooth = {Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.NEG, Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.SQRT, Ops.TRUNC, Ops.MAX, Ops.WHERE,
              Ops.CAST, Ops.REDUCE, Ops.STAGE, Ops.COPY, Ops.AFTER, Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND, Ops.PAD, Ops.SHRINK, Ops.FLIP}
    assert smooth <= set(RULES) and not {Ops.DETACH, Ops.BITCAST, Ops.CMPLT, Ops.CMPNE} & set(RULES)


def test_backward_without_marks_reaches_all_leaves():
    x, w, frozen = (Tensor([1.0, 2.0], device='PYTHON').realize() for _ in range(3))
    frozen.requires_grad_(False)
    y = x * w
    for step in range(2):
        x.grad = w.grad = None
        (y * y * frozen).sum().backward()
        assert x.grad.tolist() == [2, 32] and y.grad is None and frozen.grad is None
        if not step: y = x * w


def test_backward_without_marks_after_a_pending_write():
    x, w = (Tensor([1.0, 2.0], device='PYTHON').realize() for _ in range(2))
    for want in ([1, 2], [1, 2]):
        w.grad = None
        (x * w).sum().backward()
        assert w.grad is not None
        w.assign(w - w.grad)
        assert w.grad.tolist() == want
    assert w.tolist() == [-1, -2]


# ---- looking does not change gradients (M7)

def answers(device, look):
    """Gradients of a small network whose values are looked at, or not, on the way."""
    Tensor.manual_seed(5)
    w, v = (Tensor.randn(3, 3, device=device, requires_grad=True) for _ in range(2))
    x = Tensor([[1.0, -2.0, 0.5]], device=device)
    h = look(x @ w)
    out = look(h.relu() @ v + h.sin())
    loss = look((out * h).square().mean())
    loss.backward()
    return w.grad.numpy(), v.grad.numpy()


LOOKS = {'realize': lambda t: t.realize(), 'numpy': lambda t: t.numpy() is None or t, 'view': lambda t: t.T.realize() is None or t,
         'contiguous': lambda t: t.contiguous().realize(), 'sum': lambda t: t.sum().item() is None or t, 'twice': lambda t: t.realize().realize()}


@on_each_device
@pytest.mark.parametrize('name', LOOKS)
def test_M7_looking_does_not_change_gradients(device, name):
    for got, want in zip(answers(device, LOOKS[name]), answers(device, lambda t: t)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_M7_a_value_looked_at_later_is_still_crossed():
    w = Tensor([2.0], device='PYTHON', requires_grad=True)
    y = w * w
    z = y * 3
    y.realize()           # z reads what y became
    z.realize()
    assert grads((z * y).sum(), w, y) == [[3 * 4 * 2 ** 3], [24]]   # 3 w^4; z is 3 y


def test_values_of_overwritten_parameters_are_refused():
    w = Tensor([2.0], device='PYTHON', requires_grad=True).realize()
    y = (w * w).realize()
    z = (y * 2).realize()
    w.assign(w * 3).realize()
    for t in (y, z, z * w):
        with pytest.raises(RuntimeError, match='they or it were assigned since'): t.backward()
    assert (z.detach() * w).backward() is not None and w.grad.tolist() == [8]
    assert (y.tolist(), z.tolist(), w.tolist()) == ([4], [8], [6])


def test_a_value_computed_in_the_program_that_overwrites():
    w = Tensor([2.0], device='PYTHON', requires_grad=True).realize()
    before, loss = w * 1, (w * w).sum()
    w.assign(w + 1)
    after = w * 10
    Tensor.realize(loss, before, after, w)
    with pytest.raises(RuntimeError, match='assigned since'): loss.backward()
    assert grads(after.sum(), w) == [[10]]


def test_written_values_are_refused_unless_detached():
    w, frozen = (Tensor([2.0, 3.0], device='PYTHON', requires_grad=r).realize() for r in (True, False))
    z = (w * 2).contiguous()
    z[0:1] = 5.0
    assert grads(z.sum(), w) == [[0, 2]]
    z.realize()
    with pytest.raises(RuntimeError, match='assigned since'): z.sum().backward()
    frozen.assign(w.detach()).realize()    # a copy of the weights that nobody wants to learn
    (frozen * w).sum().backward()
    assert w.grad.tolist() == [2, 3]


def test_training_keeps_no_past():
    from tinysched.frontend.gradient import origins
    w, x = Tensor([2.0], device='PYTHON', requires_grad=True), Tensor([1.0], device='PYTHON').realize()
    losses, sizes = [], []
    for _ in range(6):
        w.grad = None
        loss = (w * x).square().sum()
        losses.append(loss)
        assert loss.item() > 0
        loss.backward()
        w.assign(w.detach() - w.grad * 0.1)
        Tensor.realize(w, w.grad)
        sizes.append(sum(len(o.value.toposort()) for _, o in origins.items() if o.value is not None))
    assert sizes[-1] == sizes[1] and [v.item() for v in losses] == sorted((v.item() for v in losses), reverse=True)
