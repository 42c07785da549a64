"""PyTorch's times for what `bun tests/bench/bench.ts --device cuda` measures, on the same GPU at the same sizes.

    python3 tests/cuda/pytorch_rates.py [OUR.json]

OUR.json is what the bench wrote with --json: then ours and the ratio stand beside. Rows do the same job on both sides, but
for a weight gradient "new in bf16": ours beside it writes fp32, twice the bytes. Timed as the bench times: calls queued
for 50 ms without a pause, so that both sides meet the same power limit; the median of five.
"""

import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(1)
tokens, hidden, vocabulary = 8192, 2688, 131072


def random(*shape, dtype=torch.bfloat16, grad=False):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def milliseconds_of(run, rounds=5, sample_seconds=0.05):
    def timed(calls):
        started = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    timed(2)
    calls = max(2, math.ceil(sample_seconds / (timed(3) / 3)))
    return 1000 * statistics.median(timed(calls) / calls for _ in range(rounds))


def both(name, shape, forward, inputs):
    """Forward, and backward alone."""
    y = forward()
    dy = torch.randn_like(y)
    yield name, shape, milliseconds_of(forward)
    yield f"{name} backward", shape, milliseconds_of(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True))


def cases():
    a, b = random(2**28, dtype=torch.float32), torch.empty(2**28, device="cuda")
    yield "copy", "1 GiB", milliseconds_of(lambda: b.copy_(a))
    del a, b
    for m, n, k in [(8192, 8192, 8192), (tokens, 3712, hidden), (tokens, hidden, 4096)]:
        x, w = random(m, k), random(n, k)
        yield "gemm", f"{m} x {n} x {k}", milliseconds_of(lambda: F.linear(x, w))
    # Images of a packed batch are items of PyTorch's.
    images = [(8, 1, 16384), (16, 1, 16384), (16, 4, 4096), (16, 16, 1024), (16, 64, 256)]
    for queries, keys, size, count, length, causal in [
        (32, 8, 128, 1, 8192, True),
        *((heads, heads, 80, count, length, False) for heads, count, length in images),
    ]:
        q = random(count, queries, length, size, grad=True)
        k, v = random(count, keys, length, size, grad=True), random(count, keys, length, size, grad=True)
        shape = f"{count} x {length}, {queries}/{keys} heads of {size}{', causal' if causal else ''}"
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield from both(
                "attention",
                shape,
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=queries != keys),
                (q, k, v),
            )
    experts, width, rows = 64, 1856, tokens * 6
    offsets = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    x, w, dy = random(rows, hidden), random(experts, width, hidden), random(rows, width)
    shape = f"{experts} x ({hidden} to {width}), {rows} rows"
    yield "grouped gemm", shape, milliseconds_of(lambda: torch._grouped_mm(x, w.transpose(1, 2), offsets))
    yield "grouped gemm, input gradient", shape, milliseconds_of(lambda: torch._grouped_mm(dy, w, offsets))
    # Ours adds to fp32 sums, or writes them at a step's first microbatch. PyTorch's product is bf16 and new: adding it takes
    # another step.
    total = torch.zeros(experts, width, hidden, device="cuda")
    added = milliseconds_of(lambda: total.add_(torch._grouped_mm(dy.t(), x, offsets)))
    yield weight_gradient, shape, added
    yield new_gradient, shape, milliseconds_of(lambda: torch._grouped_mm(dy.t(), x, offsets))
    del total
    x, weight = random(tokens, hidden, grad=True), random(hidden, grad=True)
    yield from both("RMSNorm", f"{tokens} x {hidden}", lambda: F.rms_norm(x, (hidden,), weight, 1e-5), (x, weight))
    logits = random(tokens, vocabulary, grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    shape = f"{tokens} x {vocabulary}"
    yield from both("cross entropy", shape, lambda: F.cross_entropy(logits, labels, reduction="none"), (logits,))
    del logits
    parameter = torch.nn.Parameter(random(2**28, dtype=torch.float32))
    parameter.grad = random(2**28, dtype=torch.float32)
    yield "AdamW", "256 Mi", milliseconds_of(torch.optim.AdamW([parameter], fused=True).step)


weight_gradient = "grouped gemm, weight gradient added to fp32"
new_gradient = "grouped gemm, weight gradient new in bf16"
written_gradient = "grouped gemm, weight gradient written in fp32"
ours = {}
if len(sys.argv) > 1:
    with open(sys.argv[1]) as file:
        ours = {(row["operation"], row["shape"]): row["milliseconds"] for row in json.load(file)["rows"]}
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
for name, shape, milliseconds in cases():
    own = ours.get((written_gradient if name == new_gradient else name, shape))
    beside = "" if own is None else f"  ours {own:8.3f} ms  {milliseconds / own:5.2f} x"
    print(f"{name:44} {shape:42} {milliseconds:8.3f} ms{beside}", flush=True)
