"""Layers and optimizers against NumPy, state dicts, and programs that stay the same from step to step."""
import os

import numpy as np
import pytest

import tinysched.nn as by_import
from tinysched import GlobalCounters, Tensor, nn, schedule_cache
from tinysched.nn.optim import SGD, Adam, AdamW
from tinysched.nn.state import get_parameters, get_state_dict, load_state_dict
from tinysched.runtime.device import Device

DEVICES = [d for d in os.environ.get('TS_DEVICES', 'CPU,PYTHON').split(',') if not Device.failure(d)]
R = np.random.default_rng(43)
on_each_device = pytest.mark.parametrize('device', DEVICES)
close = lambda got, want, tol=1e-5: np.testing.assert_allclose(got.numpy() if isinstance(got, Tensor) else got, want, rtol=tol, atol=tol)


@pytest.fixture(autouse=True)
def default_device(request, monkeypatch):
    "Layers live on the default device: make it the one under test"
    device = request.node.callspec.params.get('device', 'PYTHON') if hasattr(request.node, 'callspec') else 'PYTHON'
    monkeypatch.setattr(type(Device), 'DEFAULT', device)
    Tensor.manual_seed(0)


def f32(*shape): return R.standard_normal(shape).astype(np.float32)


# ---- layers

@on_each_device
def test_linear(device):
    layer, x = nn.Linear(5, 3), f32(4, 5)
    close(layer(Tensor(x)), x @ layer.weight.numpy().T + layer.bias.numpy())
    assert abs(layer.weight.numpy()).max() <= 5 ** -0.5 and layer.weight.device == device
    assert nn.Linear(5, 3, bias=False).bias is None
    with pytest.raises(ValueError, match='matmul'): layer(Tensor(f32(4, 6)))


def convolved(x, w, b, stride=1, padding=0, groups=1):
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    h, k, per = (x.shape[2] - w.shape[2]) // stride + 1, w.shape[2], w.shape[0] // groups
    out = np.zeros((x.shape[0], w.shape[0], h, h))
    for o, i, j in np.ndindex(w.shape[0], h, h):
        g = o // per * w.shape[1]
        part = x[:, g:g + w.shape[1], i * stride:i * stride + k, j * stride:j * stride + k]
        out[:, o, i, j] = (part * w[o]).sum((1, 2, 3)) + b[o]
    return out


@on_each_device
@pytest.mark.parametrize('how', [{}, dict(stride=2, padding=1), dict(groups=2)])
def test_conv2d(device, how):
    layer, x = nn.Conv2d(4, 6, 3, **how), f32(2, 4, 6, 6)
    close(layer(Tensor(x)), convolved(x, layer.weight.numpy(), layer.bias.numpy(), **how), 1e-4)


def test_conv2d_same():
    assert nn.Conv2d(1, 2, 4, padding='same')(Tensor(f32(1, 1, 5, 7))).shape == (1, 2, 5, 7)
    assert nn.Conv2d(1, 2, (3, 5), padding='same', dilation=2)(Tensor(f32(1, 1, 9, 9))).shape == (1, 2, 9, 9)
    with pytest.raises(ValueError, match='stride 2'): nn.Conv2d(1, 2, 3, stride=2, padding='same')
    with pytest.raises(ValueError, match='3 to 4 in 2 equal groups'): nn.Conv2d(3, 4, 3, groups=2)


@on_each_device
def test_layer_norm(device):
    layer, x = nn.LayerNorm((3, 4)), f32(2, 3, 4)
    layer.weight.assign(Tensor(f32(3, 4)))
    m, v = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    close(layer(Tensor(x)), (x - m) / np.sqrt(v + 1e-5) * layer.weight.numpy(), 1e-4)
    assert get_parameters(nn.LayerNorm(4, elementwise_affine=False)) == []
    with pytest.raises(ValueError, match=r'last axes of \(2, 3\) are not \(4,\)'): nn.LayerNorm(4)(Tensor(f32(2, 3)))


@on_each_device
def test_batch_norm(device):
    layer, x = nn.BatchNorm(3), f32(4, 3, 2, 2) * 2 + 1
    m, v = x.mean((0, 2, 3)), x.var((0, 2, 3))
    wide = lambda a: a[None, :, None, None]
    with Tensor.train(): y = layer(Tensor(x))
    close(y, (x - wide(m)) / np.sqrt(wide(v) + 1e-5), 1e-4)
    close(layer.running_mean, 0.1 * m, 1e-4)
    close(layer.running_var, 0.9 + 0.1 * v * 16 / 15, 1e-4)
    assert layer.num_batches_tracked.tolist() == [1]
    rm, rv = layer.running_mean.numpy(), layer.running_var.numpy()
    close(layer(Tensor(x)), (x - wide(rm)) / np.sqrt(wide(rv) + 1e-5), 1e-4)
    assert layer.num_batches_tracked.tolist() == [1] and nn.BatchNorm2d is nn.BatchNorm


@on_each_device
def test_embedding(device):
    layer = nn.Embedding(5, 3)
    idx = np.array([[4, 0], [2, 2]], np.int32)
    y = layer(Tensor(idx))
    y.sum().backward()
    close(y, layer.weight.numpy()[idx])
    close(layer.weight.grad, np.bincount(idx.ravel(), minlength=5)[:, None] * np.ones((5, 3)))


# ---- optimizers against NumPy

def sgd(p, g, s, t, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * p
    s['b'] = momentum * s.get('b', 0) + g
    return p - lr * (g + momentum * s['b'] if nesterov else s['b'])


def adam(p, g, s, t, lr, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    s['m'] = b1 * s.get('m', 0) + (1 - b1) * g
    s['v'] = b2 * s.get('v', 0) + (1 - b2) * g * g
    return p - lr * (s['m'] / (1 - b1 ** t) / (np.sqrt(s['v'] / (1 - b2 ** t)) + eps) + weight_decay * p)


WAYS = [(SGD, sgd, dict(lr=0.1)), (SGD, sgd, dict(lr=0.1, momentum=0.9)), (SGD, sgd, dict(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1)),
        (Adam, adam, dict(lr=0.1)), (Adam, adam, dict(lr=0.1, b1=0.5, b2=0.9, eps=1e-3)), (AdamW, adam, dict(lr=0.1, weight_decay=0.2))]


@on_each_device
@pytest.mark.parametrize('make,rule,how', WAYS)
def test_ten_steps_as_numpy_takes_them(device, make, rule, how):
    a, w, b = R.standard_normal((6, 4)), R.standard_normal((4, 3)), R.standard_normal(3)
    W, B, A = (Tensor(v, requires_grad=r) for v, r in ((w, True), (b, True), (a, None)))
    opt, states = make([W, B], **how), ({}, {})
    for t in range(1, 11):
        opt.zero_grad()
        ((A @ W + B).square().sum() * 0.1).backward()
        opt.step()
        d = 0.2 * (a @ w + b)
        w, b = rule(w, a.T @ d, states[0], t, **how), rule(b, d.sum(0), states[1], t, **how)
        close(W, w, 1e-9)
        close(B, b, 1e-9)


@on_each_device
def test_short_floats_learn_in_float32(device):
    p = Tensor([1.0, 2.0], dtype='bfloat16', requires_grad=True)
    opt = Adam([p], lr=0.5)
    (p * p).sum().backward()
    opt.step()
    assert p.dtype.name == 'bfloat16' and p.tolist() == [0.5, 1.5] and opt.m[id(p)].dtype.name == 'float32'


def test_step_keeps_gradients_and_one_program():
    p, q = (Tensor(f32(3), requires_grad=True).realize() for _ in 'pq')
    opt = SGD([p, q, p], lr=0.1)
    assert len(opt.params) == 2
    before = p.numpy()
    (p * p * q).sum().backward()
    want = 2 * before * q.numpy()
    opt.step()
    close(p.grad, want)
    close(p, before - 0.1 * want)


@pytest.mark.cache
@pytest.mark.parametrize('make', [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, lr=0.1)])
def test_changing_hyperparameters_is_no_new_program(make):
    layer = nn.Linear(4, 2)
    x, opt, misses = Tensor(f32(8, 4)), make(get_parameters(layer)), []
    for i in range(6):
        opt.zero_grad()
        layer(x).square().mean().backward()
        opt.step()
        opt.lr.assign(Tensor([0.1 / (i + 2)])).realize()
        misses.append(schedule_cache.misses)
    assert misses[2] == misses[-1]
    assert opt.lr.item() == pytest.approx(0.1 / 7)


def test_optimizer_refuses():
    with pytest.raises(ValueError, match='nothing to learn'): SGD([Tensor([1, 2])])
    with pytest.raises(ValueError, match='nesterov'): SGD([Tensor([1.0])], nesterov=True)
    with pytest.raises(RuntimeError, match='no parameter has a gradient'): Adam([Tensor([1.0])]).step()


def test_what_an_optimizer_marks_and_keeps():
    plain, frozen, counter = Tensor([1.0]), Tensor([1.0], requires_grad=False), Tensor([3])
    opt = SGD([plain, frozen, counter], lr=1.0)
    (plain * frozen).sum().backward()
    counter.assign(counter + 1)
    opt.step()
    assert (plain.tolist(), frozen.tolist(), counter.tolist(), frozen.grad) == ([0], [1], [4], None)
    opt.zero_grad()
    assert plain.grad is None


@on_each_device
@pytest.mark.parametrize('make', [lambda p: SGD(p, lr=0.2, momentum=0.9), lambda p: Adam(p, lr=0.05), lambda p: AdamW(p, lr=0.05)])
def test_training_reduces_loss(device, make):
    class Net:
        def __init__(self): self.layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm(4), nn.Linear(16, 3)]
        def __call__(self, x):
            conv, norm, last = self.layers
            return last(norm(conv(x)).relu().max_pool2d().flatten(1))
    net = Net()
    x, y, opt = Tensor(f32(12, 1, 6, 6)), Tensor(R.integers(0, 3, 12).astype(np.int32)), make(get_parameters(net))
    losses = []
    with Tensor.train():
        for _ in range(15):
            opt.zero_grad()
            losses.append(net(x).cross_entropy(y).backward())
            opt.step()
    losses = [v.item() for v in losses]
    assert losses[-1] < 0.4 * losses[0]
    assert net.layers[1].num_batches_tracked.tolist() == [15]


# ---- state

class Model:
    def __init__(self): self.body, self.heads, self.size = [nn.Linear(3, 4)], {'a': nn.Linear(4, 2, bias=False)}, 3


def test_state_dict_names():
    model = Model()
    assert list(get_state_dict(model)) == ['body.0.weight', 'body.0.bias', 'heads.a.weight']
    assert list(get_state_dict(model, 'net.'))[0] == 'net.body.0.weight'
    assert len(get_parameters(model)) == 3 and get_state_dict(Tensor([1.0]), 'x')['x'].tolist() == [1]
    model.parent = model   # a model that knows itself
    assert len(get_state_dict(model)) == 3


def test_load_state_dict():
    a, b = Model(), Model()
    b.heads['a'].weight.realize()
    storage = b.heads['a'].weight.uop
    load_state_dict(b, get_state_dict(a))
    for x, y in zip(get_parameters(a), get_parameters(b)): close(x, y.numpy(), 0)
    assert b.heads['a'].weight.uop is storage
    load_state_dict(b, {'body.0.bias': np.arange(4, dtype=np.float64)}, strict=False)
    assert b.body[0].bias.tolist() == [0, 1, 2, 3] and b.body[0].bias.dtype.name == 'float32'


def test_load_state_dict_refuses_and_changes_nothing():
    model = Model()
    state = get_state_dict(Model())
    before = [p.numpy() for p in get_parameters(model)]
    state['extra'] = state.pop('body.0.bias')
    state['heads.a.weight'] = Tensor.zeros(2, 5)
    with pytest.raises(RuntimeError) as e: load_state_dict(model, state)
    said = str(e.value)
    assert 'missing: body.0.bias (4,)' in said and 'unexpected: extra' in said
    assert 'shape of heads.a.weight: (2, 5) given, (2, 4) wanted' in said
    with pytest.raises(RuntimeError, match='shape of'): load_state_dict(model, state, strict=False)
    for p, x in zip(get_parameters(model), before): close(p, x, 0)


def test_names_programs_bring_along():
    import tinysched.nn.optim
    import tinysched.nn.state
    assert by_import is nn and nn.optim is tinysched.nn.optim and nn.state is tinysched.nn.state
    assert nn.optim.SGD is SGD and nn.state.get_parameters is get_parameters and GlobalCounters
