"""What hand-shaped generated kernels reach on this CPU, and what each compile route costs.

  python ck_bench.py [--part speed,latency,pocl,llvm] [--threads 1,2] [--reps 7] [--n 16777216]

Needs gcc; uses clang, tcc, pyopencl (PoCL), llvmlite when present (skips the rest). numpy is the yardstick.
Run the numpy part with OPENBLAS_CORETYPE / OPENBLAS_L2_SIZE unset.
"""
import argparse, ctypes, os, shutil, statistics, subprocess, tempfile, time
import numpy as np
import benchlib as B

ap = argparse.ArgumentParser()
ap.add_argument("--part", default="speed,latency,pocl,llvm")
ap.add_argument("--threads", default="1,2")
ap.add_argument("--reps", type=int, default=7)
ap.add_argument("--n", type=int, default=1 << 24)
ap.add_argument("--mm", default="512,1024", help="matmul sizes")
ap.add_argument("--kernels", default="", help="speed part only: comma list of add,chain,sum,softmax,matmul")
a = ap.parse_args()
parts = a.part.split(",")
K = lambda n: not a.kernels or n in a.kernels.split(",")
TMP = tempfile.mkdtemp(prefix="ckb")
print(f"# {B.machine()} | numpy {np.__version__}")

# ---------------------------------------------------------------- C sources
HDR = "#include <stddef.h>\n"
ADD = HDR + "void k(float*restrict o,const float*restrict a,const float*restrict b,long n){for(long i=0;i<n;i++)o[i]=a[i]+b[i];}\n"
ADD_OMP = HDR + "void k(float*restrict o,const float*restrict a,const float*restrict b,long n){\n#pragma omp parallel for schedule(static)\nfor(long i=0;i<n;i++)o[i]=a[i]+b[i];}\n"
CHAIN = HDR + "void k(float*restrict o,const float*restrict a,const float*restrict b,long n){for(long i=0;i<n;i++){float t=(a[i]+b[i])*1.5f+0.25f;t=t>0?t:0;o[i]=t*t-0.5f;}}\n"
SUM = HDR + "void k(float*restrict o,const float*restrict a,const float*restrict b,long n){float s=0;for(long i=0;i<n;i++)s+=a[i];*o=s;}\n"
VEC = HDR + "typedef float v8 __attribute__((vector_size(32)));typedef float v8u __attribute__((vector_size(32),aligned(4)));\n"
SUM_V = VEC + """static float part(const float*a,long n){v8 s[8];for(int j=0;j<8;j++)s[j]=(v8){0};long i=0;
for(;i+64<=n;i+=64)for(int j=0;j<8;j++)s[j]+=*(const v8u*)(a+i+8*j);
for(int j=1;j<8;j++)s[0]+=s[j];float t=0;for(int j=0;j<8;j++)t+=s[0][j];for(;i<n;i++)t+=a[i];return t;}
void k(float*restrict o,const float*restrict a,const float*restrict b,long n){double t=0;long c=1<<16;
PRAGMA
for(long i=0;i<n;i+=c)t+=part(a+i,n-i<c?n-i:c);*o=t;}
"""
SM_NAIVE = HDR + """float expf(float);void k(float*restrict o,const float*restrict a,const float*restrict b,long n){for(long r=0;r<4096;r++){
const float*x=a+r*1024;float*y=o+r*1024;float m=x[0];for(int i=0;i<1024;i++)m=x[i]>m?x[i]:m;
float s=0;for(int i=0;i<1024;i++){y[i]=expf(x[i]-m);s+=y[i];}s=1/s;for(int i=0;i<1024;i++)y[i]*=s;}}
"""
SM_POLY = VEC + """typedef int i8 __attribute__((vector_size(32)));
static inline v8 vmax(v8 a,v8 b){i8 m=a>b;return (v8)((m&(i8)a)|(~m&(i8)b));}
static inline v8 vexp(v8 x){x=vmax(x,(v8){}-87.0f);v8 z=x*1.44269504f+12582912.0f;v8 n=z-12582912.0f;v8 f=x-n*0.693145752f;f=f-n*1.42860677e-6f;
v8 p=((((f*0.00138888889f+0.00833333333f)*f+0.0416666667f)*f+0.166666667f)*f+0.5f)*f*f+f+1.0f;
i8 e=((i8)z<<23);return (v8)((i8)p+e);}
void k(float*restrict o,const float*restrict a,const float*restrict b,long n){
PRAGMA
for(long r=0;r<4096;r++){
const float*x=a+r*1024;float*y=o+r*1024;v8 m[4];for(int j=0;j<4;j++)m[j]=*(v8u*)(x+8*j);
for(int i=0;i<1024;i+=32)for(int j=0;j<4;j++){v8 t=*(const v8u*)(x+i+8*j);m[j]=vmax(t,m[j]);}
for(int j=1;j<4;j++)m[0]=vmax(m[0],m[j]);float mm=m[0][0];for(int j=1;j<8;j++)mm=m[0][j]>mm?m[0][j]:mm;
v8 s[4];for(int j=0;j<4;j++)s[j]=(v8){};for(int i=0;i<1024;i+=32)for(int j=0;j<4;j++){v8 e=vexp(*(const v8u*)(x+i+8*j)-mm);s[j]+=e;*(v8u*)(y+i+8*j)=e;}
s[0]+=s[1]+s[2]+s[3];float ss=0;for(int j=0;j<8;j++)ss+=s[0][j];ss=1/ss;for(int i=0;i<1024;i+=8)*(v8u*)(y+i)=*(v8u*)(y+i)*ss;}}
"""
MM_DOT = HDR + "void k(float*restrict c,const float*restrict a,const float*restrict b,long n){for(long i=0;i<n;i++)for(long j=0;j<n;j++){float s=0;for(long k=0;k<n;k++)s+=a[i*n+k]*b[k*n+j];c[i*n+j]=s;}}\n"
MM_IKJ = HDR + "void k(float*restrict c,const float*restrict a,const float*restrict b,long n){for(long i=0;i<n;i++){for(long j=0;j<n;j++)c[i*n+j]=0;for(long k=0;k<n;k++){float t=a[i*n+k];for(long j=0;j<n;j++)c[i*n+j]+=t*b[k*n+j];}}}\n"
def mm_tile(MR, NV, pack=False, kc=0):
    """Register tile of MR rows by NV 8-wide vectors. pack: copy each B panel (k x 8*NV) into a contiguous
    buffer first. kc: block k (0 = whole k)."""
    w = NV * 8
    ld = (lambda v: f"*(const v8*)(p+{8*v})") if pack else (lambda v: f"*(const v8u*)(p+{8*v})")
    acc = ";".join(f"v8 c{r}_{v}=(v8){{}};if(!first)c{r}_{v}=*(v8u*)(c+(i+{r})*n+j+{8*v})" for r in range(MR) for v in range(NV))
    body = ";".join(f"v8 b{v}={ld(v)}" for v in range(NV)) + ";" + "".join(
        f"{{float s{r}=a[(i+{r})*n+kk];v8 t={{s{r},s{r},s{r},s{r},s{r},s{r},s{r},s{r}}};" + "".join(f"c{r}_{v}+=t*b{v};" for v in range(NV)) + "}" for r in range(MR))
    st = ";".join(f"*(v8u*)(c+(i+{r})*n+j+{8*v})=c{r}_{v}" for r in range(MR) for v in range(NV))
    tailrow = f"""for(;i<n;i++)for(long jj=j;jj<j+{w};jj++){{float s=first?0:c[i*n+jj];for(long kk=k0;kk<k1;kk++)s+=a[i*n+kk]*b[kk*n+jj];c[i*n+jj]=s;}}"""
    KC = kc or 1 << 30
    packc = f"float P[{min(KC, 4096) * w}] __attribute__((aligned(64)));for(long kk=k0;kk<k1;kk++)for(int q=0;q<{w};q++)P[(kk-k0)*{w}+q]=b[kk*n+j+q];" if pack else ""
    start, step = ("const float*p=P", f"p+={w}") if pack else ("const float*p=b+k0*n+j", "p+=n")
    return VEC + f"""void k(float*restrict c,const float*restrict a,const float*restrict b,long n){{
for(long k0=0;k0<n;k0+={KC}){{long k1=k0+{KC}<n?k0+{KC}:n;int first=k0==0;
PRAGMA
for(long j=0;j<n;j+={w}){{{packc}long i=0;for(;i+{MR}<=n;i+={MR}){{{acc};{start};for(long kk=k0;kk<k1;kk++,{step}){{{body}}}{st};}}
{tailrow}}}}}}}
"""
import resource
def cpu():
    """CPU seconds of this process and of its finished children."""
    r = resource.getrusage(resource.RUSAGE_CHILDREN); return time.process_time() + r.ru_utime + r.ru_stime
def pragma(src, omp, red=""): return src.replace("PRAGMA", f"#pragma omp parallel for schedule(static){red}" if omp else "")

def build(cc, src, flags, keep=[0]):
    keep[0] += 1
    c, so = f"{TMP}/k{keep[0]}.c", f"{TMP}/k{keep[0]}.so"
    open(c, "w").write(src)
    t = time.perf_counter()
    r = subprocess.run([cc, "-shared", "-fPIC", *flags, c, "-o", so] + (["-lm"] if cc != "tcc" else []), capture_output=True, text=True)
    dt = time.perf_counter() - t
    if r.returncode: raise RuntimeError(f"{cc}: {r.stderr[:300]}")
    t = time.perf_counter(); f = ctypes.CDLL(so).k; dl = time.perf_counter() - t
    f.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long]; f.restype = None
    return f, dt, dl

def timeit(f, reps=None):
    """(median wall, best wall, best CPU time over all threads): the last is the steadier one on a shared machine."""
    ts, cs = [], []
    f()
    for _ in range(reps or a.reps):
        c = time.process_time(); t = time.perf_counter(); f(); ts.append(time.perf_counter() - t); cs.append(time.process_time() - c)
    return statistics.median(ts), min(ts), max(min(cs), 1e-9)

N = a.n
x, y, o = (np.random.rand(N).astype(np.float32) for _ in range(3))
sm_in, sm_out = G_in, G_out = np.random.randn(4096, 1024).astype(np.float32), np.empty((4096, 1024), np.float32)
P = lambda z: z.ctypes.data
NATIVE = ["-O3", "-march=native"]; FAST = NATIVE + ["-ffast-math"]
def np_softmax():
    np.subtract(sm_in, sm_in.max(1, keepdims=True), out=sm_out); np.exp(sm_out, out=sm_out); np.divide(sm_out, sm_out.sum(1, keepdims=True), out=sm_out)
ths = [int(t) for t in a.threads.split(",")]

if "speed" in parts:
    T = B.Table("kernel", "how", "threads", "median ms", "best ms", "best CPU ms", "rate (best wall)", "rate (CPU time, 1 thr)", "max err")
    def put(k, how, th, tm, amount, unit, err=""): T.add(k, how, th, f"{tm[0]*1e3:.2f}", f"{tm[1]*1e3:.2f}", f"{tm[2]*1e3:.2f}", f"{amount/tm[1]/1e9:.2f} {unit}", f"{amount/tm[2]/1e9:.2f}" if str(th) == "1" else "-", err)
    nb = 12.0 * N
    if K("add") or K("chain"):
        put("copy 16M", "numpy copyto", 1, timeit(lambda: np.copyto(o, x)), 8.0 * N, "GB/s")
        put("add 16M", "numpy add(out=)", 1, timeit(lambda: np.add(x, y, out=o)), nb, "GB/s")
        for cc, fl, src, th in [("gcc", ["-O2"], ADD, 1), ("gcc", NATIVE, ADD, 1), ("clang", NATIVE, ADD, 1), ("tcc", [], ADD, 1)] + [("gcc", NATIVE + ["-fopenmp"], ADD_OMP, t) for t in ths if t > 1]:
            if not shutil.which(cc): continue
            os.environ["OMP_NUM_THREADS"] = str(th); f, *_ = build(cc, src, fl)
            put("add 16M", f"{cc} {' '.join(fl)}", th, timeit(lambda: f(P(o), P(x), P(y), N)), nb, "GB/s", f"{np.abs(o-(x+y)).max():.0e}")
        for cc, fl in [("gcc", NATIVE), ("clang", NATIVE)]:
            f, *_ = build(cc, CHAIN, fl); put("6-op chain 16M", f"{cc} {' '.join(fl)}", 1, timeit(lambda: f(P(o), P(x), P(y), N)), nb, "GB/s")
        put("6-op chain 16M", "numpy (temporaries)", 1, timeit(lambda: np.square(np.maximum((x + y) * np.float32(1.5) + np.float32(.25), 0)) - np.float32(.5), 3), nb, "GB/s")
    if K("sum"):
        r1 = np.zeros(1, np.float32); ref = x.sum(dtype=np.float64)
        put("sum 16M", "numpy sum", 1, timeit(lambda: x.sum()), 4.0 * N, "GB/s", f"{abs(x.sum()-ref)/ref:.0e}")
        for how, cc, fl, src, th in [("naive", "gcc", NATIVE, SUM, 1), ("naive", "gcc", FAST, SUM, 1), ("naive", "clang", FAST, SUM, 1), ("8 vec accumulators", "gcc", NATIVE, pragma(SUM_V, 0), 1), ("8 vec accumulators", "clang", NATIVE, pragma(SUM_V, 0), 1)] + \
                                [("8 vec acc + omp", "gcc", NATIVE + ["-fopenmp"], pragma(SUM_V, 1, " reduction(+:t)"), t) for t in ths if t > 1]:
            f, *_ = build(cc, src, fl)
            tm = timeit(lambda: f(P(r1), P(x), P(y), N)); put("sum 16M", f"{how}: {cc} {' '.join(fl)}", th, tm, 4.0 * N, "GB/s", f"{abs(float(r1[0])-ref)/ref:.0e}")
    if K("softmax"):
        np_softmax(); want = sm_out.copy()
        put("softmax 4096x1024", "numpy, in place", 1, timeit(np_softmax), 8.0 * sm_in.size, "GB/s")
        for how, cc, fl, src, th in [("libm expf", "gcc", NATIVE, SM_NAIVE, 1), ("libm expf", "gcc", FAST, SM_NAIVE, 1), ("inline poly exp", "gcc", NATIVE, pragma(SM_POLY, 0), 1), ("inline poly exp", "clang", NATIVE, pragma(SM_POLY, 0), 1)] + \
                                [("inline poly exp + omp", "gcc", NATIVE + ["-fopenmp"], pragma(SM_POLY, 1), t) for t in ths if t > 1]:
            f, *_ = build(cc, src, fl)
            tm = timeit(lambda: f(P(sm_out), P(sm_in), P(sm_in), 0)); put("softmax 4096x1024", f"{how}: {cc} {' '.join(fl)}", th, tm, 8.0 * sm_in.size, "GB/s", f"{np.abs(sm_out/want-1).max():.0e}")
    if K("matmul"):
        for n in map(int, a.mm.split(",")):
            A, Bm, C = (np.random.randn(n, n).astype(np.float32) for _ in range(3)); W = A @ Bm; fl2 = 2.0 * n ** 3
            put(f"matmul {n}", "numpy/OpenBLAS", os.environ.get("OPENBLAS_NUM_THREADS", "all"), timeit(lambda: np.matmul(A, Bm, out=C)), fl2, "GFLOP/s")
            vs = [("naive dot", "gcc", FAST, MM_DOT, 1), ("ikj loop", "gcc", NATIVE, MM_IKJ, 1)]
            for mr, nv in ((4, 2), (6, 2), (4, 3), (8, 1)):
                for cc in ("gcc", "clang"): vs.append((f"tile {mr}x{8*nv}", cc, NATIVE, pragma(mm_tile(mr, nv), 0), 1))
            for cc in ("gcc", "clang"):
                vs.append(("tile 6x16 + pack B", cc, NATIVE, pragma(mm_tile(6, 2, True), 0), 1))
                vs.append(("tile 6x16 + pack B, kc=256", cc, NATIVE, pragma(mm_tile(6, 2, True, 256), 0), 1))
                vs.append(("tile 4x24 + pack B, kc=256", cc, NATIVE, pragma(mm_tile(4, 3, True, 256), 0), 1))
            for t in ths:
                if t > 1: vs.append(("tile 6x16 + pack B + omp", "gcc", NATIVE + ["-fopenmp"], pragma(mm_tile(6, 2, True), 1), t))
            for how, cc, fl, src, th in vs:
                if not shutil.which(cc) or (n == 1024 and how == "naive dot"): continue
                if n % 24 and "x24" in how: continue
                f, *_ = build(cc, src, fl); C[:] = 0
                tm = timeit(lambda: f(P(C), P(A), P(Bm), n), a.reps if "naive" not in how else 2)
                put(f"matmul {n}", f"{how}: {cc} {' '.join(fl)}", th, tm, fl2, "GFLOP/s", f"{np.abs(C-W).max():.0e}")
    T.show("kernel speed, C through .so + ctypes")

if "latency" in parts:
    T = B.Table("compiler", "flags", "add", "6-op chain", "softmax (poly)", "matmul 6x16", "dlopen us (best)", "best wall of all")
    srcs = [ADD, CHAIN, pragma(SM_POLY, 0), pragma(mm_tile(6, 2), 0)]
    for cc, fl in [("gcc", ["-O0"]), ("gcc", ["-O1", "-march=native"]), ("gcc", ["-O2", "-march=native"]), ("gcc", NATIVE), ("gcc", NATIVE + ["-fopenmp"]),
                   ("clang", ["-O1", "-march=native"]), ("clang", ["-O2", "-march=native"]), ("clang", ["-O2", "-march=native", "-fuse-ld=lld"]), ("clang", NATIVE), ("tcc", [])]:
        if not shutil.which(cc): continue
        row, dls, ws = [], [], []
        for s in srcs:
            try:
                ts = []
                for _ in range(a.reps): c = cpu(); _, dt, dl = build(cc, s, fl); ts.append(cpu() - c); ws.append(dt); dls.append(dl)
                row.append(f"{statistics.median(ts)*1e3:.0f}")
            except Exception as e: row.append("unsupported")
        T.add(cc, " ".join(fl), *row, f"{min(dls)*1e6:.0f}", f"{min(ws)*1e3:.0f}" if ws else "-")
    if shutil.which("clang"):   # object only, by pipe, no linker (what an ELF loader needs)
        row = []
        for s in srcs:
            ts = []
            for _ in range(a.reps):
                t = cpu(); subprocess.run(["clang", "-c", "-x", "c", "-O2", "-march=native", "-ffreestanding", "-nostdlib", "-fPIC", "-", "-o", "-"], input=s.encode(), capture_output=True, check=True)
                ts.append(cpu() - t)
            row.append(f"{statistics.median(ts)*1e3:.0f}")
        T.add("clang", "-c -O2 by pipe, no link", *row, "-", "-")
    many = "".join(CHAIN.replace("void k(", f"void k{i}(").replace("0.25f", f"{i}.25f") for i in range(50))
    for cc, fl in (("gcc", ["-O2", "-march=native"]), ("gcc", NATIVE), ("clang", ["-O2", "-march=native"]), ("tcc", [])):
        if not shutil.which(cc): continue
        ts = []
        for _ in range(3):
            open(f"{TMP}/m.c", "w").write(many); t = cpu()
            subprocess.run([cc, "-shared", "-fPIC", *fl, f"{TMP}/m.c", "-o", f"{TMP}/m.so"], check=True, capture_output=True); ts.append(cpu() - t)
        T.add(cc, " ".join(fl) + " 50 chain kernels in ONE file", "-", f"{statistics.median(ts)*1e3/50:.1f} each", "-", "-", "-", "-")
    T.show("compile latency: median CPU ms (child included), subprocess to .so")

if "pocl" in parts:
    try:
        import pyopencl as cl
        plat = [p for p in cl.get_platforms() if "Portable" in p.name][0]
        ctx = cl.Context(plat.get_devices()); q = cl.CommandQueue(ctx); mf = cl.mem_flags
    except Exception as e: print("pocl skipped:", e); cl = None
    if cl:
        T = B.Table("PoCL kernel", "build cold CPU ms", "build again CPU ms (disk cache)", "first enqueue CPU ms", "best wall ms", "best CPU ms (all threads)", "rate per CPU second", "max err")
        CLADD = "__kernel void k(__global float*o,__global const float*a,__global const float*b){size_t i=get_global_id(0);o[i]=a[i]+b[i];}"
        CLMM = "__kernel void k(__global float*c,__global const float*a,__global const float*b){size_t i=get_global_id(0)*%d,j=get_global_id(1)*16;" % 6
        def clmm(mr, n):
            d = "".join(f"float16 c{r}=0;" for r in range(mr))
            body = "float16 v=vload16(0,b+kk*%d+j);" % n + "".join(f"c{r}=fma((float16)a[(i+{r})*{n}+kk],v,c{r});" for r in range(mr))
            st = "".join(f"vstore16(c{r},0,c+(i+{r})*{n}+j);" for r in range(mr))
            return f"__kernel void k(__global float*c,__global const float*a,__global const float*b){{size_t i=get_global_id(0)*{mr},j=get_global_id(1)*16;{d}for(int kk=0;kk<{n};kk++){{{body}}}{st}}}"
        def go(name, src, bufs, gs, ls, amount, unit, check):
            u = src + f"\n// {time.time()}\n"
            t = cpu(); p = cl.Program(ctx, u).build("-cl-mad-enable"); kk = p.k; cold = cpu() - t
            hs = [cl.Buffer(ctx, mf.READ_WRITE | mf.COPY_HOST_PTR, hostbuf=z) for z in bufs]
            t = cpu(); kk(q, gs, ls, *hs); q.finish(); fe = cpu() - t
            t = cpu(); cl.Program(ctx, u).build("-cl-mad-enable").k; again = cpu() - t
            def f(): kk(q, gs, ls, *hs); q.finish()
            tm = timeit(f); r = np.empty_like(bufs[0]); cl.enqueue_copy(q, r, hs[0])
            T.add(name, B.ms(cold), B.ms(again), B.ms(fe), B.ms(tm[1]), B.ms(tm[2]), f"{amount/tm[2]/1e9:.2f} {unit}", f"{np.abs(r-check).max():.0e}")
        go("add 16M, local 256", CLADD, [o, x, y], (N,), (256,), 12.0 * N, "GB/s", x + y)
        go("add 16M, local 4096", CLADD, [o, x, y], (N,), (4096,), 12.0 * N, "GB/s", x + y)
        go("add 4096", CLADD, [o[:4096].copy(), x[:4096].copy(), y[:4096].copy()], (4096,), (256,), 12.0 * 4096, "GB/s", x[:4096] + y[:4096])
        for n in (512, 1024):
            A, Bm, C = (np.random.randn(n, n).astype(np.float32) for _ in range(3)); W = A @ Bm
            for mr in (4, 8): go(f"matmul {n}, {mr}x16", clmm(mr, n), [C, A, Bm], (n // mr, n // 16), (1, 4), 2.0 * n ** 3, "GFLOP/s", W)
        T.show(f"PoCL ({plat.version}), all cores ({ctx.devices[0].max_compute_units})")

if "llvm" in parts:
    try:
        import llvmlite, llvmlite.binding as ll
        for f in ("initialize_native_target", "initialize_native_asmprinter"): getattr(ll, f)()
    except Exception as e: print("llvmlite skipped:", e); ll = None
    if ll:
        head = "declare float @llvm.maxnum.f32(float, float)\ndeclare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)\n"
        sig = "define void @k(ptr noalias %o, ptr noalias %a, ptr noalias %b, i64 %n) {\nentry:\n  br label %L\nL:\n  %i = phi i64 [0, %entry], [%i2, %L]\n"
        end = "  %i2 = add nuw nsw i64 %i, 1\n  %c = icmp ult i64 %i2, %n\n  br i1 %c, label %L, label %X\nX:\n  ret void\n}\n"
        ldab = "  %pa = getelementptr float, ptr %a, i64 %i\n  %pb = getelementptr float, ptr %b, i64 %i\n  %po = getelementptr float, ptr %o, i64 %i\n  %va = load float, ptr %pa\n  %vb = load float, ptr %pb\n"
        ir_add = head + sig + ldab + "  %r = fadd float %va, %vb\n  store float %r, ptr %po\n" + end
        ir_chain = head + sig + ldab + ("  %s = fadd float %va, %vb\n  %m = fmul float %s, 1.5\n  %q = fadd float %m, 0.25\n  %z = fcmp ogt float %q, 0.0\n  %t = select i1 %z, float %q, float 0.0\n"
                 "  %u = fmul float %t, %t\n  %r = fadd float %u, -0.5\n  store float %r, ptr %po\n") + end
        ir_sum = ("define void @k(ptr noalias %o, ptr noalias %a, ptr noalias %b, i64 %n) {\nentry:\n  br label %L\nL:\n  %i = phi i64 [0, %entry], [%i2, %L]\n  %s = phi float [0.0, %entry], [%s2, %L]\n"
                  "  %p = getelementptr float, ptr %a, i64 %i\n  %v = load float, ptr %p\n  %s2 = fadd fast float %s, %v\n  %i2 = add nuw nsw i64 %i, 1\n  %c = icmp ult i64 %i2, %n\n  br i1 %c, label %L, label %X\nX:\n  store float %s2, ptr %o\n  ret void\n}\n")
        def ir_mm(mr):
            L = ["define void @k(ptr noalias %o, ptr noalias %a, ptr noalias %b, i64 %n) {", "entry:", "  br label %J", "J:", "  %j = phi i64 [0, %entry], [%j2, %Je]", "  br label %I", "I:", "  %i = phi i64 [0, %J], [%i2, %Ie]", "  br label %K", "K:", "  %k = phi i64 [0, %I], [%k2, %K]"]
            for r in range(mr): L.append(f"  %c{r} = phi <16 x float> [zeroinitializer, %I], [%d{r}, %K]")
            L += ["  %kn = mul i64 %k, %n", "  %kj = add i64 %kn, %j", "  %pb = getelementptr float, ptr %b, i64 %kj", "  %bv = load <16 x float>, ptr %pb, align 4"]
            for r in range(mr):
                L += [f"  %ir{r} = add i64 %i, {r}", f"  %in{r} = mul i64 %ir{r}, %n", f"  %ik{r} = add i64 %in{r}, %k", f"  %pa{r} = getelementptr float, ptr %a, i64 %ik{r}", f"  %av{r} = load float, ptr %pa{r}",
                      f"  %x{r} = insertelement <16 x float> undef, float %av{r}, i32 0", f"  %y{r} = shufflevector <16 x float> %x{r}, <16 x float> undef, <16 x i32> zeroinitializer",
                      f"  %d{r} = call <16 x float> @llvm.fma.v16f32(<16 x float> %y{r}, <16 x float> %bv, <16 x float> %c{r})"]
            L += ["  %k2 = add nuw nsw i64 %k, 1", "  %kc = icmp ult i64 %k2, %n", "  br i1 %kc, label %K, label %Ie", "Ie:"]
            for r in range(mr): L += [f"  %sr{r} = add i64 %i, {r}", f"  %sn{r} = mul i64 %sr{r}, %n", f"  %sj{r} = add i64 %sn{r}, %j", f"  %ps{r} = getelementptr float, ptr %o, i64 %sj{r}", f"  store <16 x float> %d{r}, ptr %ps{r}, align 4"]
            L += [f"  %i2 = add i64 %i, {mr}", "  %ic = icmp ult i64 %i2, %n", "  br i1 %ic, label %I, label %Je", "Je:", "  %j2 = add i64 %j, 16", "  %jc = icmp ult i64 %j2, %n", "  br i1 %jc, label %J, label %X", "X:", "  ret void", "}"]
            return head + "\n".join(L)
        ctypes_sig = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
        tgt = ll.Target.from_default_triple()
        def jit(ir, opt):
            t = time.process_time()
            tm = tgt.create_target_machine(cpu=ll.get_host_cpu_name(), features=ll.get_host_cpu_features().flatten(), opt=min(opt, 3))
            m = ll.parse_assembly(ir); m.verify(); t1 = time.process_time()
            if opt:
                pto = ll.create_pipeline_tuning_options(speed_level=opt); pto.loop_vectorization = True; pto.slp_vectorization = True; pto.loop_unrolling = True
                pb = ll.create_pass_builder(tm, pto); pb.getModulePassManager().run(m, pb)
            t2 = time.process_time()
            e = ll.create_mcjit_compiler(m, tm); e.finalize_object(); f = ctypes_sig(e.get_function_address("k")); t3 = time.process_time()
            return e, f, (t1 - t, t2 - t1, t3 - t2)
        n = 512; A, Bm, C = (np.random.randn(n, n).astype(np.float32) for _ in range(3)); r1 = np.zeros(1, np.float32)
        T = B.Table("LLVM kernel", "opt", "first ms", "total ms (min of later)", "parse/opt/emit ms", "best wall ms", "best CPU ms", "rate (CPU time)", "max err")
        for name, ir, args, amount, unit, chk in [("add 16M", ir_add, (o, x, y, N), 12.0 * N, "GB/s", lambda: np.abs(o - (x + y)).max()), ("6-op chain 16M", ir_chain, (o, x, y, N), 12.0 * N, "GB/s", lambda: 0),
                ("sum 16M", ir_sum, (r1, x, y, N), 4.0 * N, "GB/s", lambda: abs(r1[0] / x.sum(dtype=np.float64) - 1)), ("matmul 512 4x16", ir_mm(4), (C, A, Bm, n), 2.0 * n ** 3, "GFLOP/s", lambda: np.abs(C - A @ Bm).max())]:
            for opt in (0, 1, 2, 3):
                ts = []
                for _ in range(6):
                    e, f, sp = jit(ir, opt); ts.append((sum(sp), sp))
                tm = timeit(lambda: f(*[P(z) if isinstance(z, np.ndarray) else z for z in args]), 5 if opt else 2)
                b = min(ts[1:])
                T.add(name, f"O{opt}", B.ms(ts[0][0]), B.ms(b[0]), "/".join(f"{s*1e3:.1f}" for s in b[1]), B.ms(tm[1]), B.ms(tm[2]), f"{amount/tm[2]/1e9:.2f} {unit}", f"{chk():.0e}")
        T.show(f"llvmlite {llvmlite.__version__} (LLVM {'.'.join(map(str, ll.llvm_version_info))}), in process, 1 thread, compile in CPU ms")
shutil.rmtree(TMP)
