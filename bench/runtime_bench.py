"""Warm run time of common ops and training steps.

  python runtime_bench.py --lib tinygrad|tinysched|numpy|torch [--threads 1] [--reps 15] [--only add,matmul] [--json f]

For a lazy library each op is timed two ways: 'eager' = build graph + schedule (cache hit) + run, and 'jit' = the
library's TinyJit/jit when it has one. Rates use the best wall time, and the best CPU time over all threads is
printed as well, since the machine may be shared. Run `--lib numpy` next to it, at the same time of day, for ratios.
"""
import argparse, os, time
ap = argparse.ArgumentParser()
ap.add_argument("--lib", default="tinygrad")
ap.add_argument("--threads", type=int, default=0)
ap.add_argument("--reps", type=int, default=15)
ap.add_argument("--only", default="")
ap.add_argument("--nojit", action="store_true")
ap.add_argument("--budget", type=float, default=4.0, help="seconds per row")
ap.add_argument("--json", default="")
a = ap.parse_args()
if a.threads:
    for v in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"): os.environ[v] = str(a.threads)
import gc, statistics
import numpy as np
import benchlib as B

rng = np.random.default_rng(0)
rnd = lambda *s: rng.standard_normal(s, dtype=np.float32)
only = [x for x in a.only.split(",") if x]
want = lambda n: not only or any(n.startswith(o) for o in only)
N = 1 << 24
T = B.Table("op", "mode", "median ms", "best ms", "best CPU ms", "rate (best wall)", "rate (CPU time)")
out = {}

def timeit(f):
    ts, cs, t_end = [], [], time.perf_counter() + a.budget
    f(); f(); f()
    gc.collect()
    for i in range(a.reps):
        c = time.process_time(); t = time.perf_counter(); f(); ts.append(time.perf_counter() - t); cs.append(time.process_time() - c)
        if time.perf_counter() > t_end and i >= 3: break
    return statistics.median(ts), min(ts), max(min(cs), 1e-9)

def put(name, mode, f, amount, unit, scale=1e9):
    try: tm = timeit(f)
    except Exception as e:
        T.add(name, mode, f"{type(e).__name__}: {str(e)[:60]}", *["-"] * 4); return
    out[f"{name}/{mode}"] = dict(median=tm[0], best=tm[1], cpu=tm[2], rate=amount / tm[1] / scale, unit=unit)
    T.add(name, mode, f"{tm[0]*1e3:.3f}", f"{tm[1]*1e3:.3f}", f"{tm[2]*1e3:.3f}", f"{amount/tm[1]/scale:.2f} {unit}", f"{amount/tm[2]/scale:.2f}")

OPS = [  # name, arrays, amount, unit
    ("add16M", lambda: (rnd(N), rnd(N)), 12.0 * N, "GB/s"),
    ("chain16M", lambda: (rnd(N), rnd(N)), 12.0 * N, "GB/s"),
    ("sum16M", lambda: (rnd(N),), 4.0 * N, "GB/s"),
    ("sumrows4096x4096", lambda: (rnd(4096, 4096),), 4.0 * N, "GB/s"),
    ("sumcols4096x4096", lambda: (rnd(4096, 4096),), 4.0 * N, "GB/s"),
    ("softmax4096x1024", lambda: (rnd(4096, 1024),), 8.0 * 4096 * 1024, "GB/s"),
    ("layernorm4096x1024", lambda: (rnd(4096, 1024),), 8.0 * 4096 * 1024, "GB/s"),
    ("transpose4096", lambda: (rnd(4096, 4096),), 8.0 * N, "GB/s"),
    ("matmul512", lambda: (rnd(512, 512), rnd(512, 512)), 2.0 * 512 ** 3, "GFLOP/s"),
    ("matmul1024", lambda: (rnd(1024, 1024), rnd(1024, 1024)), 2.0 * 1024 ** 3, "GFLOP/s"),
    ("matmul1024bT", lambda: (rnd(1024, 1024), rnd(1024, 1024)), 2.0 * 1024 ** 3, "GFLOP/s"),
    ("conv3x3_64_56", lambda: (rnd(1, 64, 56, 56), rnd(64, 64, 3, 3)), 2.0 * 64 * 64 * 9 * 56 * 56, "GFLOP/s"),
    ("tiny_add16", lambda: (rnd(16), rnd(16)), 1.0, "kcall/s"),
]

if a.lib == "numpy":
    print(f"# numpy {np.__version__} threads={a.threads or 'default'} | {B.machine()}")
    def sm(x, o): np.subtract(x, x.max(-1, keepdims=True), out=o); np.exp(o, out=o); np.divide(o, o.sum(-1, keepdims=True), out=o)
    def ln(x):
        c = x - x.mean(-1, keepdims=True); return c / np.sqrt((c * c).mean(-1, keepdims=True) + np.float32(1e-5))
    def conv(x, w):
        p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        win = np.lib.stride_tricks.sliding_window_view(p, (3, 3), axis=(2, 3))[0].transpose(0, 3, 4, 1, 2).reshape(64 * 9, 56 * 56)
        return w.reshape(64, 576) @ win
    fns = dict(add16M=lambda o: lambda x, y: np.add(x, y, out=o), chain16M=lambda o: lambda x, y: np.square(np.maximum((x + y) * np.float32(1.5) + np.float32(.25), 0)) - np.float32(.5),
               sum16M=lambda o: lambda x: x.sum(), sumrows4096x4096=lambda o: lambda x: x.sum(1), sumcols4096x4096=lambda o: lambda x: x.sum(0), softmax4096x1024=lambda o: lambda x: sm(x, o),
               layernorm4096x1024=lambda o: ln, transpose4096=lambda o: lambda x: np.copyto(o, x.T), matmul512=lambda o: lambda x, y: np.matmul(x, y, out=o), matmul1024=lambda o: lambda x, y: np.matmul(x, y, out=o),
               matmul1024bT=lambda o: lambda x, y: np.matmul(x, y.T, out=o), conv3x3_64_56=lambda o: conv, tiny_add16=lambda o: lambda x, y: np.add(x, y, out=o))
    if want("copy16M"):
        x, o = rnd(N), np.empty(N, np.float32); put("copy16M", "numpy", lambda: np.copyto(o, x), 8.0 * N, "GB/s")
    for name, mk, amount, unit in OPS:
        if not want(name): continue
        args = mk(); o = np.empty_like(args[0]); f = fns[name](o)
        put(name, "numpy", lambda: f(*args), amount, unit, 1e3 if unit.startswith("kcall") else 1e9)
    # plain numpy MLP training step, the same net as below
    if want("mlp_train"):
        W = [rnd(i, k) * np.float32(i ** -.5) for i, k in ((784, 512), (512, 512), (512, 10))]; b = [np.zeros(k, np.float32) for k in (512, 512, 10)]
        x, y = rnd(128, 784), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 128)]
        def step():
            h1 = np.maximum(x @ W[0] + b[0], 0); h2 = np.maximum(h1 @ W[1] + b[1], 0); z = h2 @ W[2] + b[2]
            e = np.exp(z - z.max(1, keepdims=True)); g = (e / e.sum(1, keepdims=True) - y) / np.float32(128)
            g2 = (g @ W[2].T) * (h2 > 0); g1 = (g2 @ W[1].T) * (h1 > 0)
            for i, (h, gg) in enumerate(((x, g1), (h1, g2), (h2, g))): W[i] -= np.float32(.01) * (h.T @ gg); b[i] -= np.float32(.01) * gg.sum(0)
        put("mlp_train b128", "numpy", step, 128.0, "samples/s", 1)
elif a.lib == "torch":
    import torch, torch.nn.functional as F
    if a.threads: torch.set_num_threads(a.threads)
    print(f"# torch {torch.__version__} threads={torch.get_num_threads()} | {B.machine()}")
    def mkout(o): return o
    fns = dict(add16M=lambda o: lambda x, y: torch.add(x, y, out=o), chain16M=lambda o: lambda x, y: torch.relu((x + y) * 1.5 + .25).square() - .5, sum16M=lambda o: lambda x: x.sum(),
               sumrows4096x4096=lambda o: lambda x: x.sum(1), sumcols4096x4096=lambda o: lambda x: x.sum(0), softmax4096x1024=lambda o: lambda x: torch.softmax(x, -1), layernorm4096x1024=lambda o: lambda x: F.layer_norm(x, (1024,)),
               transpose4096=lambda o: lambda x: o.copy_(x.T), matmul512=lambda o: lambda x, y: torch.matmul(x, y, out=o), matmul1024=lambda o: lambda x, y: torch.matmul(x, y, out=o), matmul1024bT=lambda o: lambda x, y: torch.matmul(x, y.T, out=o),
               conv3x3_64_56=lambda o: lambda x, w: F.conv2d(x, w, padding=1), tiny_add16=lambda o: lambda x, y: torch.add(x, y, out=o))
    for name, mk, amount, unit in OPS:
        if not want(name): continue
        args = [torch.from_numpy(z) for z in mk()]; o = torch.empty_like(args[0]); f = fns[name](o)
        with torch.no_grad(): put(name, "torch", lambda: f(*args), amount, unit, 1e3 if unit.startswith("kcall") else 1e9)
    def train(name, net, x, y, nb):
        opt = torch.optim.SGD(net.parameters(), lr=.01)
        def step(): opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
        put(name, "torch", step, float(nb), "samples/s", 1)
    nn = torch.nn
    if want("mlp_train"): train("mlp_train b128", nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), torch.from_numpy(rnd(128, 784)), torch.randint(0, 10, (128,)), 128)
    if want("digits"): train("digits_cnn_train b64", nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)), torch.from_numpy(rnd(64, 1, 8, 8)), torch.randint(0, 10, (64,)), 64)
    if want("encoder"):
        enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(384, 6, 1536, 0.0, batch_first=True, norm_first=True), 6, enable_nested_tensor=False).train(); x = torch.from_numpy(rnd(1, 128, 384))
        with torch.no_grad(): put("encoder6_fwd T128", "torch", lambda: enc(x), 128.0, "tokens/s", 1)
else:
    lib = B.load(a.lib)
    import graphs as G
    print(f"# {lib.info()} threads={a.threads or 'default'} | {B.machine()}")
    fns = dict(add16M=lambda x, y: x + y, chain16M=lambda x, y: (lambda t: t * t - .5)(((x + y) * 1.5 + .25).relu()), sum16M=lambda x: x.sum(), sumrows4096x4096=lambda x: x.sum(axis=1), sumcols4096x4096=lambda x: x.sum(axis=0),
               softmax4096x1024=lambda x: x.softmax(-1), layernorm4096x1024=lambda x: G.layernorm(x, 1.0, 0.0), transpose4096=lambda x: x.permute(1, 0).contiguous(), matmul512=lambda x, y: x @ y, matmul1024=lambda x, y: x @ y,
               matmul1024bT=lambda x, y: x @ y.permute(1, 0), conv3x3_64_56=lambda x, w: x.conv2d(w, padding=1), tiny_add16=lambda x, y: x + y)
    for name, mk, amount, unit in OPS:
        if not want(name): continue
        args = [lib.input(z) for z in mk()]; f = fns[name]; sc = 1e3 if unit.startswith("kcall") else 1e9
        def eager(): lib.realize([f(*args)]); lib.sync()
        put(name, "eager", eager, amount, unit, sc)
        j = None if a.nojit else lib.jit(lambda *xs: f(*xs).realize())
        if j:
            def jitted(): j(*args); lib.sync()
            put(name, "jit", jitted, amount, unit, sc)
        del args; gc.collect()
    def train(name, build, nb, unit="samples/s"):
        def eager(): lib.realize(build()); lib.sync()
        put(name, "eager", eager, float(nb), unit, 1)
        if a.nojit: return
        def body():
            o = build(); lib.realize(o); return o[0]
        j = lib.jit(body)
        if j:
            def jitted(): j(); lib.sync()
            put(name, "jit", jitted, float(nb), unit, 1)
    if want("mlp_train"): train("mlp_train b128", G.make_mlp_train(lib), 128)
    if want("digits"): train("digits_cnn_train b64", G.make_digits_train(lib), 64)
    if want("encoder"): train("encoder6_fwd T128", G.make_encoder_fwd(lib), 128, "tokens/s")
T.show(f"warm run time, {a.lib}")
B.dump(a.json, out)
