"""What one call of a jitted train step costs: a three-layer network so small that launching is nearly all there is.

    DEV=CPU python jit_bench.py --lib tinysched
    DEV=CPU python jit_bench.py --lib tinygrad
"""
import argparse, importlib, statistics, time
import numpy as np


def network(lib, optimizer, width):
    "A jitted train step and its inputs"
    nn, Tensor = lib.nn, lib.Tensor
    layers = [nn.Linear(width, width) for _ in range(3)]
    opt = getattr(nn.optim, optimizer)([p for layer in layers for p in nn.state.get_parameters(layer)], lr=0.01)

    @lib.TinyJit
    def step(x, y):
        opt.zero_grad()
        for layer in layers[:-1]: x = layer(x).relu()
        loss = (layers[-1](x) - y).square().mean()
        loss.backward()
        opt.step()
        return loss.realize()

    rng = np.random.default_rng(0)
    inputs = [Tensor(rng.standard_normal((4, width)).astype(np.float32)).realize() for _ in range(2)]
    return step, inputs


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--lib', default='tinysched')
    p.add_argument('--calls', type=int, default=300)
    p.add_argument('--width', type=int, default=16)
    a = p.parse_args()
    lib = importlib.import_module(a.lib)
    if a.lib == 'tinygrad': import tinygrad.nn.optim, tinygrad.nn.state   # noqa: F401
    training = lib.Tensor.train() if a.lib == 'tinysched' else importlib.import_module('tinygrad.helpers').Context(TRAINING=1)
    with training:
        for optimizer in ('SGD', 'Adam'):
            step, inputs = network(lib, optimizer, a.width)
            for _ in range(5): step(*inputs)
            wall, began = [], time.process_time()
            for _ in range(a.calls):
                start = time.perf_counter()
                step(*inputs)
                wall.append((time.perf_counter() - start) * 1e6)
            cpu = (time.process_time() - began) / a.calls * 1e6
            print(f'{a.lib:10s} {optimizer:5s} {len(step.captured.linear.src):3d} kernels, microseconds a call: '
                  f'{statistics.median(wall):7.1f} median, {min(wall):7.1f} best, {cpu:7.1f} CPU time')


if __name__ == '__main__': main()
