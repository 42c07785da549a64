"""Mamba-2's scan on one GPU, against the Triton kernels of mamba_ssm.

    python3 tests/bench/scan.py LIBRARY [--mamba FOLDER] [--tokens N] [--rounds N] [--head-dim N]

LIBRARY: libmimo_cuda.so. --mamba: the folder that holds the package `mamba_ssm`, where Python does not find it. Heads of 64 are those
of Nemotron 3 Nano, heads of 80 those of Nemotron Nano 12B v2. The limit of a direction: its inputs and outputs moved once at 4.2 TB/s.
"""

import argparse
import sys

import torch
from native_library import Library, own_header
from turns import medians

parser = argparse.ArgumentParser()
parser.add_argument("library")
parser.add_argument("--mamba")
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--head-dim", type=int, help="heads of this size alone")
options = parser.parse_args()
if options.mamba:
    sys.path.insert(0, options.mamba)
try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError as error:
    print(f"without mamba_ssm: {error}")
    mamba_chunk_scan_combined = None
library = Library(options.library, own_header)
tokens, groups, states = options.tokens, 8, 128
print(torch.cuda.get_device_name())
for heads, width in ((64, 64), (128, 80), (64, 128)):
    if options.head_dim not in (None, width):
        continue
    torch.manual_seed(1)
    inner, shared = heads * width, groups * states
    row = 2 * inner + 2 * shared + heads
    rows = torch.randn(tokens, row, device="cuda", dtype=torch.bfloat16)
    drows = torch.empty_like(rows)
    dt_bias = torch.empty(heads, device="cuda").uniform_(-4, -1)
    a_log = torch.empty(heads, device="cuda").uniform_(0, 2)
    d = torch.randn(heads, device="cuda")
    d_o = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16)
    o, y = torch.empty_like(d_o), torch.empty_like(d_o)
    columns = {"z": 0, "x": inner, "b": 2 * inner, "c": 2 * inner + shared, "dt": 2 * inner + 2 * shared}
    common = {
        **{name: rows.data_ptr() + 2 * column for name, column in columns.items()},
        **{"dt_bias": dt_bias, "a_log": a_log, "d": d, "z_factors": 0, "y": y},
        **{"cu_seqlens": torch.tensor([0, tokens], device="cuda", dtype=torch.int32), "sequences": 1, "tokens": tokens},
        **{"heads": heads, "head_dim": width, "groups": groups, "state_dim": states, "chunk_size": 128, "dtype": 1},
        **{"xbc_stride": row, "z_stride": row, "dt_stride": row, "dt_minimum": 0},
    }
    sums = {name: torch.zeros(heads, device="cuda") for name in ("ddt_bias", "da_log", "dd")}
    gradients = {f"d{name}": drows.data_ptr() + 2 * column for name, column in columns.items()}
    strides = {"dxbc_stride": row, "dz_stride": row, "ddt_stride": row, "dz_factors": 0}
    forward, kept = library.call("ssd_forward", **common, o=o, final_state=0)
    backward, also_kept = library.call("ssd_backward", **common, d_o=d_o, **gradients, **sums, **strides)
    contenders = {"forward": {"mimo": forward}, "backward": {"mimo": backward}}
    if mamba_chunk_scan_combined is not None:
        parts = rows.split((inner, inner, shared, shared, heads), 1)
        z, x, b, c, dt = (part.unsqueeze(0).contiguous() for part in parts)
        leaves = [value.detach().requires_grad_() for value in (z, x, b, c, dt, a_log, d, dt_bias)]

        def theirs():
            z, x, b, c, dt, rate, skip, bias = leaves
            per_head, per_group = (1, tokens, heads, width), (1, tokens, groups, states)
            return mamba_chunk_scan_combined(
                *(x.view(per_head), dt, -rate.exp(), b.view(per_group), c.view(per_group)),
                **{"chunk_size": 256, "D": skip, "z": z.view(per_head), "dt_bias": bias, "dt_softplus": True},
            )

        result, gradient = theirs(), d_o.view(1, tokens, heads, width)

        def their_forward():
            with torch.no_grad():
                theirs()

        contenders["forward"]["mamba_ssm"] = their_forward
        contenders["backward"]["mamba_ssm"] = lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)
        forward(), backward()
        torch.cuda.synchronize()

        def difference(mine, other):
            return ((mine.float() - other.float()).norm() / other.float().norm()).item()

        own = [*drows.split((inner, inner, shared, shared, heads), 1), sums["da_log"], sums["dd"], sums["ddt_bias"]]
        found = [value.squeeze(0) for value in contenders["backward"]["mamba_ssm"]()]
        names = ("dz", "dx", "db", "dc", "ddt", "da_log", "dd", "ddt_bias")
        print(f"differences from mamba_ssm: o {difference(o, result.flatten(2)[0]):.1e}", end="")
        print("".join(f", {name} {difference(*pair):.1e}" for name, *pair in zip(names, own, found, strict=True)))
    moved = {"forward": 4 * inner + 2 * shared + heads, "backward": 6 * inner + 4 * shared + 2 * heads}
    for direction, runs in contenders.items():
        times = medians(runs, options.rounds)
        limit = 1000 * tokens * 2 * moved[direction] / 4.2e12
        line = f"{heads} heads of {width}, {direction:9} mimo {times['mimo']:7.3f} ms, limit {limit:.3f} ms ({limit / times['mimo']:.0%})"
        if "mamba_ssm" in times:
            line += f", mamba_ssm {times['mamba_ssm']:7.3f} ms: {times['mamba_ssm'] / times['mimo']:.2f} x"
        print(line, flush=True)
