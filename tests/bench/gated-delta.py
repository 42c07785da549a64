"""The gated delta rule on one GPU at Qwen3-Next's sizes, against the Triton kernels of flash-linear-attention.

    python3 tests/bench/gated-delta.py LIBRARY [--fla FOLDER] [--any-triton] [--tokens N] [--rounds N] [--kernels]

LIBRARY: libmimo_cuda.so. --fla: the folder that holds the package `fla`, where Python does not find it. --any-triton: also with a
Triton whose code for the package's backward is known to be wrong on Hopper: its time says something, its values do not. Both compute the gates and
norms from the same inputs. All contenders run in one process, in turn in every round, each for 40 ms of queued calls after 80 ms
untimed; a row is the median of the rounds. The limit of a direction: its products at 690 TFLOP/s, or its inputs and outputs moved
once at 4.2 TB/s, whichever is longer.
"""

import argparse
import sys

import torch
from native_library import Library, own_header
from turns import medians

parser = argparse.ArgumentParser()
parser.add_argument("library")
parser.add_argument("--fla")
parser.add_argument("--any-triton", action="store_true")
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--kernels", action="store_true", help="times of single kernels, by PyTorch's profiler")
options = parser.parse_args()
if options.fla:
    sys.path.insert(0, options.fla)
torch.manual_seed(1)
tokens, key_heads, value_heads, width, bf16 = options.tokens, 16, 32, 128, 1
keys, values = key_heads * width, value_heads * width
qkv = torch.randn(tokens, 2 * keys + values, device="cuda", dtype=torch.bfloat16)
ba = torch.randn(tokens, 2 * value_heads, device="cuda", dtype=torch.bfloat16)
dt_bias = torch.empty(value_heads, device="cuda").uniform_(-4, 0)
a_log = torch.empty(value_heads, device="cuda").uniform_(-1, 2)
d_o = torch.randn(tokens, values, device="cuda", dtype=torch.bfloat16)
o, dqkv, dba = torch.empty_like(d_o), torch.empty_like(qkv), torch.empty_like(ba)
library = Library(options.library, own_header)


def parts(of_qkv, of_ba):
    """Pointers to q, k, v, b and a within their rows."""
    at, beside = of_qkv.data_ptr(), of_ba.data_ptr()
    return at, at + 2 * keys, at + 4 * keys, beside, beside + 2 * value_heads


q, k, v, b, a = parts(qkv, ba)
dq, dk, dv, db, da = parts(dqkv, dba)
shared = {
    **{"q": q, "k": k, "v": v, "b": b, "a": a, "dt_bias": dt_bias, "a_log": a_log},
    **{"cu_seqlens": torch.tensor([0, tokens], device="cuda", dtype=torch.int32), "sequences": 1, "tokens": tokens},
    **{"key_heads": key_heads, "value_heads": value_heads, "key_dim": width, "value_dim": width, "dtype": bf16},
    **{"qkv_stride": 2 * keys + values, "ba_stride": 2 * value_heads},
}
gradients = {"dq": dq, "dk": dk, "dv": dv, "db": db, "da": da, "dqkv_stride": 2 * keys + values, "dba_stride": 2 * value_heads}
sums = {"ddt_bias": torch.zeros_like(dt_bias), "da_log": torch.zeros_like(a_log)}
forward, kept = library.call("gated_delta_forward", **shared, o=o, final_state=0)
backward, also_kept = library.call("gated_delta_backward", **shared, d_o=d_o, **gradients, **sums)
contenders = {"forward": {"mimo": forward}, "backward": {"mimo": backward}}
try:
    import fla.ops.common.chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError as error:
    print(f"without flash-linear-attention: {error}")
else:
    if options.any_triton:
        fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
    heads = [part.unflatten(1, (-1, width)).unsqueeze(0).contiguous() for part in qkv.split((keys, keys, values), 1)]
    leaves = [x.detach().requires_grad_() for x in (*heads, *(x.contiguous().unsqueeze(0) for x in ba.chunk(2, 1)), a_log, dt_bias)]

    def theirs():
        q, k, v, b, a, rate, bias = leaves
        return chunk_gated_delta_rule(
            *(q, k, v, a, b),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=rate,
            dt_bias=bias,
        )[0]

    result, gradient = theirs(), d_o.view(1, tokens, value_heads, width)

    def their_forward():
        with torch.no_grad():
            theirs()

    contenders["forward"]["fla"] = their_forward
    contenders["backward"]["fla"] = lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)
    forward(), backward()
    torch.cuda.synchronize()

    def difference(x, y):
        return ((x.float() - y.float()).norm() / y.float().norm()).item()

    dparts = torch.autograd.grad(result, leaves, gradient, retain_graph=True)
    own = [*(x.unflatten(1, (-1, width)) for x in dqkv.split((keys, keys, values), 1)), *dba.chunk(2, 1), sums["da_log"], sums["ddt_bias"]]
    names = ("dq", "dk", "dv", "db", "da", "da_log", "ddt_bias")
    print(f"differences from fla: o {difference(o, result.flatten(2)[0]):.1e}", end="")
    print("".join(f", {name} {difference(x, y.squeeze(0)):.1e}" for name, x, y in zip(names, own, dparts, strict=True)))


pairs = 64  # tokens of a chunk
products = {"forward": 2 * (3 * width + 4 * pairs) * width, "backward": 2 * (12 * width + 12 * pairs) * width}
moved = {"forward": 2 * (2 * keys + 2 * values), "backward": 2 * (4 * keys + 3 * values)}
print(f"{torch.cuda.get_device_name()}, {tokens} tokens, {key_heads} key heads, {value_heads} value heads of {width}")
for direction, runs in contenders.items():
    times = medians(runs, options.rounds)
    own = times["mimo"]
    limit = 1000 * tokens * max(value_heads * products[direction] / 690e12, moved[direction] / 4.2e12)
    line = f"{direction:9} mimo {own:7.3f} ms, limit {limit:.3f} ms ({limit / own:.0%})"
    if "fla" in times:
        other = times["fla"]
        line += f", fla {other:7.3f} ms: {other / own:.2f} x"
    print(line, flush=True)
if options.kernels:
    from torch.profiler import ProfilerActivity, profile

    for direction, runs in contenders.items():
        for name, run in runs.items():
            with profile(activities=[ProfilerActivity.CUDA]) as record:
                for _ in range(10):
                    run()
                torch.cuda.synchronize()
            rows = sorted(record.key_averages(), key=lambda row: -row.device_time_total)[:10]
            for row in rows:
                print(f"  {direction} {name} {row.device_time_total / 10000:8.3f} ms  {row.key[:110]}")
