"""Feed-forward layers of experts on one GPU: grouped_mlp against products and activation as operations of their own, and
against PyTorch's `_grouped_mm` with an eager and with a compiled activation.

    python3 tests/bench/grouped-mlp.py LIBRARY [--before LIBRARY HEADER] [--rounds N] [--json FILE] [--kernels]
        [--without-pytorch] [--uneven]

LIBRARY: libmimo_cuda.so. --before: another build, and its mimo.h with the folder mimo/ beside it, if it has one; that build runs
the separate operations. All contenders run in one process, in turn in every round, each for 40 ms of queued calls; a row is the
median of the rounds, with the tenth and the ninetieth percentile. 80 ms of the same calls come before, untimed: at its power
limit a GPU's clock follows the load of the last tens of milliseconds, and a contender would be measured at the clock that the
contender before it left. Layers have the sizes of Nemotron-3-Nano (half of its experts) and Qwen3-30B-A3B.
`forward`: z is kept for a backward pass. `backward`: gradients of rows and probabilities. `all`: both, and the gradients of
the weights: ours added to fp32, PyTorch's new in bf16.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import time

import torch
from native_library import Library, header_text, own_header

parser = argparse.ArgumentParser()
parser.add_argument("library")
parser.add_argument("--before", nargs=2)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--json")
parser.add_argument("--without-pytorch", action="store_true")
parser.add_argument("--uneven", action="store_true", help="also experts with unequal numbers of rows")
parser.add_argument("--kernels", action="store_true", help="times of single kernels, by PyTorch's profiler")
options = parser.parse_args()
torch.manual_seed(1)
header = header_text(own_header)


def random(*shape, scale=1.0, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=torch.float32 if math.prod(shape) < 2**28 else dtype).mul_(scale).to(dtype)


infinity = math.inf
tokens = 8192
spare_factors = int(re.search(r"#define MIMO_E4M3_SPARE_FACTORS (\d+)", header)[1])
activations = {
    name: int(re.search(rf"MIMO_ACTIVATION_{constant} = (\d)", header)[1])
    for name, constant in {"squared ReLU": "SQUARED_RELU", "SwiGLU": "SWIGLU"}.items()
}


class Layer:
    def __init__(self, groups, hidden, width, activation, rows, uneven):
        self.sizes = f"{groups} x ({hidden} to {width}), {activation}, {rows} rows{', uneven' if uneven else ''}"
        self.gated = activation == "SwiGLU"
        self.kind = activations[activation]
        self.groups, self.hidden, self.width, self.rows = groups, hidden, width, rows
        self.z_width = 2 * width if self.gated else width
        counts = torch.full((groups,), rows // groups)
        if uneven:
            share = torch.rand(groups).pow(2) + 0.05
            counts = (share / share.sum() * rows).long()
            counts[0] += rows - counts.sum()
        self.ends = counts.cumsum(0).to("cuda", torch.int32)
        self.offsets = torch.cat([torch.zeros(1, device="cuda", dtype=torch.int32), self.ends])
        self.x, self.dy = random(rows, hidden), random(rows, hidden)
        self.w1 = random(groups, self.z_width, hidden, scale=hidden**-0.5)
        self.w2 = random(groups, hidden, width, scale=width**-0.5)
        self.p = torch.rand(rows, device="cuda") * 0.5 + 0.1
        self.dw1 = torch.zeros(groups, self.z_width, hidden, device="cuda")
        self.dw2 = torch.zeros(groups, hidden, width, device="cuda")
        self.kept = []
        # The slots of all rows, and the tokens and gradients that permutations copy.
        order = torch.randperm(rows, device="cuda").to(torch.int32)
        self.routing = order, {name: random(tokens, hidden) for name in ("x", "dy")}

    def empty(self, *widths):
        return [torch.empty(self.rows, width, device="cuda", dtype=torch.bfloat16) for width in widths]

    def call(self, library, operation, **values):
        run, keep = library.call(operation, offsets=self.offsets, rows=self.rows, groups=self.groups, **values)
        self.kept.append(keep)
        return run

    def product(self, library, a, b, c, n, k, transpose_b):
        return self.call(library, "grouped_gemm", a=a, b=b, c=c, n=n, k=k, transpose_b=transpose_b, a_dtype=1, b_dtype=1, c_dtype=1)

    def weight_gradients(self, library, dy, hs, dz, accumulate=1, **recipe):
        def of(dy, x, dw, n, k):
            types = dict(accumulate=accumulate, dy_dtype=1, x_dtype=1, **recipe)
            return self.call(library, "grouped_gemm_weight_gradient", dy=dy, x=x, dw=dw, n=n, k=k, **types)

        return [of(dy, hs, self.dw2, self.hidden, self.width), of(dz, self.x, self.dw1, self.z_width, self.hidden)]

    def rounded_rows(self, width):
        """Bytes and factors of rows in e4m3."""
        values = torch.empty(self.rows, width, device="cuda", dtype=torch.uint8)
        return values, torch.empty(-(-width // 128) * self.rows + spare_factors, device="cuda")

    def separate(self, library):
        """Three operations forward, three backward."""
        z, hs, y, dhs, dz, dx = self.empty(self.z_width, self.width, self.hidden, self.width, self.z_width, self.hidden)
        dp = torch.empty(self.rows, device="cuda")
        sizes = dict(row_count=None, rows=self.rows, width=self.width)
        activation = dict(row_probability=self.p, clamp=infinity, kind=self.kind, dtype=1, **sizes)

        def act(direction, **tensors):
            run, keep = library.call(f"activation_{direction}", **activation, **tensors)
            self.kept.append(keep)
            return run

        forward = [
            self.product(library, self.x, self.w1, z, self.z_width, self.hidden, 1),
            act("forward", x=z, y=hs),
            self.product(library, hs, self.w2, y, self.hidden, self.width, 1),
        ]
        backward = [
            self.product(library, self.dy, self.w2, dhs, self.width, self.hidden, 0),
            act("backward", dy=dhs, x=z, dx=dz, drow_probability=dp),
            self.product(library, dz, self.w1, dx, self.hidden, self.z_width, 0),
        ]
        return forward, backward, self.weight_gradients(library, self.dy, hs, dz), dict(z=z, y=y, dz=dz, dx=dx, dp=dp, hs=hs)

    def whole(self, library):
        z, hs, y, dz, dx = self.empty(self.z_width, self.width, self.hidden, self.z_width, self.hidden)
        dp = torch.empty(self.rows, device="cuda")
        sizes = dict(hidden=self.hidden, width=self.width)
        layer = dict(w1=self.w1, w2=self.w2, row_probability=self.p, clamp=infinity, kind=self.kind, dtype=1, **sizes)
        forward = [self.call(library, "grouped_mlp_forward", x=self.x, z=z, y=y, **layer)]
        inference = [self.call(library, "grouped_mlp_forward", x=self.x, y=y, **layer)]
        backward = [self.call(library, "grouped_mlp_backward", dy=self.dy, z=z, dx=dx, dz=dz, hs=hs, drow_probability=dp, **layer)]
        results = dict(z=z, y=y, dz=dz, dx=dx, dp=dp, hs=hs)
        return forward, inference, backward, self.weight_gradients(library, self.dy, hs, dz), results

    def matrices_in_e4m3(self, library):
        """The calls that round the layer's matrices, which a training step makes once, and the arguments that name the results."""
        rounding, names = [], {"forward": {}, "backward": {}}
        for name, matrices in (("w1", self.w1), ("w2", self.w2)):
            count, rows, width = matrices.shape
            values, turned = (torch.empty(matrices.numel(), device="cuda", dtype=torch.uint8) for _ in range(2))
            factors = torch.empty(count, -(-rows // 128), -(-width // 128), device="cuda")
            run, keep = library.call(
                "e4m3_matrices", matrices=matrices, values=values, transposed=turned, factors=factors, count=count, rows=rows, width=width, dtype=1
            )
            self.kept.append(keep)
            rounding.append(run)
            names["forward"] |= {name: values, f"{name}_factors": factors}
            names["backward"] |= {name: turned, f"{name}_factors": factors}
        return rounding, names

    def in_e4m3(self, library, names, rounded=({}, {})):
        """The layer in e4m3. `names`: its matrices; `rounded`: forward's and backward's rows in e4m3 where something else has
        rounded them."""
        z, hs, y, dz, dx = self.empty(self.z_width, self.width, self.hidden, self.z_width, self.hidden)
        dp = torch.empty(self.rows, device="cuda")
        sizes = dict(hidden=self.hidden, width=self.width)
        layer = dict(row_probability=self.p, clamp=infinity, kind=self.kind, recipe=1, dtype=1, **sizes)
        forward = [self.call(library, "grouped_mlp_forward", x=self.x, z=z, y=y, **rounded[0], **names["forward"], **layer)]
        results = dict(z=z, y=y, dz=dz, dx=dx, dp=dp, hs=hs)
        gradients = dict(dy=self.dy, z=z, dx=dx, dz=dz, hs=hs, drow_probability=dp)
        backward = [self.call(library, "grouped_mlp_backward", **gradients, **rounded[1], **names["backward"], **layer)]
        return forward, backward, results

    def in_e4m3_alone(self, library, names, rounded):
        """The layer whose rows are in e4m3 alone, the gradients of its weights too. `rounded`: forward's and backward's rows."""
        z, y, dx = self.empty(self.z_width, self.hidden, self.hidden)
        dp = torch.empty(self.rows, device="cuda")
        sizes = dict(hidden=self.hidden, width=self.width)
        layer = dict(row_probability=self.p, clamp=infinity, kind=self.kind, recipe=1, dtype=1, **sizes)
        forward = [self.call(library, "grouped_mlp_forward", z=z, y=y, **rounded[0], **names["forward"], **layer)]
        x, dy = (tuple(of.values()) for of in rounded)
        dz, hs = self.rounded_rows(self.z_width), self.rounded_rows(self.width)
        written = dict(dz_e4m3=dz[0], dz_factors=dz[1], hs_e4m3=hs[0], hs_factors=hs[1], dx=dx, drow_probability=dp)
        backward = [self.call(library, "grouped_mlp_backward", z=z, **written, **rounded[1], **names["backward"], **layer)]
        weights = []
        for left, right, dw in ((dy, hs, self.dw2), (dz, x, self.dw1)):
            operands = dict(dy=left[0], dy_factors=left[1], x=right[0], x_factors=right[1], dw=dw)
            types = dict(accumulate=1, recipe=1, dy_dtype=3, x_dtype=3, n=left[0].shape[1], k=right[0].shape[1])
            weights.append(self.call(library, "grouped_gemm_weight_gradient", **operands, **types))
        return forward, backward, weights, dict(z=z, y=y, dx=dx, dp=dp)

    def e4m3_errors(self, got):
        """Of the first group's first rows, against products of operands that PyTorch rounded to e4m3."""

        def rounded(blocks, dimensions):
            largest = blocks.abs().amax(dimensions, keepdim=True)
            factor = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(448 / largest))), 1.0)
            return (blocks * factor).to(torch.float8_e4m3fn).float() / factor

        def product(rows, matrix):
            (m, k), n = rows.shape, len(matrix)
            pad = -k % 128
            rows = torch.nn.functional.pad(rows.float(), (0, pad))
            matrix = torch.nn.functional.pad(matrix.float(), (0, pad, 0, -n % 128))
            rows = rounded(rows.view(m, -1, 128), (2,)).view(m, -1)
            shape = matrix.shape
            matrix = rounded(matrix.reshape(shape[0] // 128, 128, shape[1] // 128, 128), (1, 3)).reshape(shape)
            return rows @ matrix[:n].T

        rows = min(int(self.ends[0]), 256)
        z, p = got["z"][:rows].float(), self.p[:rows, None]
        if self.gated:
            gate, linear = z.chunk(2, -1)
            s = torch.sigmoid(gate)
            a, slopes = gate * s * linear, torch.cat([linear * (s + gate * s * (1 - s)), gate * s], -1)
        else:
            a, slopes = torch.relu(z).square(), 2 * torch.relu(z)
        w1, w2 = self.w1[0], self.w2[0]
        dhs = product(self.dy[:rows], w2.T).repeat(1, slopes.shape[1] // self.width)
        expected = {
            "z": product(self.x[:rows], w1),
            "y": product((p * a).bfloat16(), w2),
            "dz": p * dhs * slopes,
            "hs": p * a,
            "dx": product(got["dz"][:rows], w1.T),
            "dp": (dhs[:, : self.width] * a).sum(1),
        }
        return {name: error(got[name][:rows], value) for name, value in expected.items()}

    def torch_forward(self, act, x, w1, w2, p):
        z = torch._grouped_mm(x, w1.transpose(1, 2), self.ends)
        return torch._grouped_mm(act(z, p), w2.transpose(1, 2), self.ends)

    def activation(self, z, p):
        if self.gated:
            gate, linear = z.chunk(2, -1)
            return (torch.nn.functional.silu(gate) * linear * p[:, None].to(z.dtype)).contiguous()
        return torch.relu(z).square() * p[:, None].to(z.dtype)


    def permutations(self, library, recipe):
        """The permutations before forward, of tokens, and before backward, of their gradients, as a rank that has every expert
        makes them, and the arguments of grouped_mlp that come from them. `recipe`: bf16; e4m3, which rounds the rows too; or alone,
        which writes rounded rows only."""
        topk = self.rows // tokens
        order, source = self.routing
        runs, arguments = [], []
        for name, rows in (("x", self.x), ("dy", self.dy)):
            written = dict(rows=rows) if recipe != "alone" else {}
            if recipe != "bf16":
                values, factors = self.rounded_rows(self.hidden)
                written |= dict(e4m3=values, e4m3_factors=factors)
                arguments.append({f"{name}_e4m3": values, f"{name}_factors": factors})
            sizes = dict(tokens=tokens, topk=topk, width=self.hidden, dtype=1)
            run, keep = library.call("moe_permute", x=source[name], slot_of_row=order, **written, **sizes)
            self.kept.append(keep)
            runs.append(run)
        return runs, arguments


def in_order(calls):
    def run():
        for call in calls:
            call()

    return run


def compare(contenders):
    """Milliseconds of each, all in turn in every round."""

    def timed(run, calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started) / calls

    calls = {}
    for name, run in contenders.items():
        timed(run, 2)
        calls[name] = max(3, math.ceil(40 / timed(run, 3)))
    times = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            timed(run, 2 * calls[name])
            times[name].append(timed(run, calls[name]))
    return times


def error(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def kernels(name, run):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    print(f"  kernels of {name}, mean of 10 calls")
    for event in sorted(trace.key_averages(), key=lambda event: -event.device_time_total)[:10]:
        short = re.sub(r"mimo::cuda::|\(anonymous namespace\)::|std::", "", event.key)[:110]
        print(f"    {event.device_time_total / 10000:8.4f} ms  {short}")


library = Library(options.library, own_header)
before = Library(*options.before) if options.before else library
result = []
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {options.rounds} rounds")
for sizes in [
    (64, 2688, 1856, "squared ReLU", 49152, False),
    (64, 2688, 1856, "squared ReLU", 49152, True),
    (128, 2048, 768, "SwiGLU", 65536, False),
]:
    if sizes[-1] and not options.uneven:
        continue
    layer = Layer(*sizes)
    flops = 2 * layer.rows * layer.hidden * (layer.z_width + layer.width)
    print(f"\n{layer.sizes}; forward {flops / 1e12:.3f} TFLOP")
    torch.cuda.synchronize()
    forward, backward, weights, expected = layer.separate(before)
    own_forward, inference, own_backward, own_weights, actual = layer.whole(library)
    in_order(forward + backward)()
    in_order(own_forward + own_backward)()
    torch.cuda.synchronize()
    print("  differences of the results: " + ", ".join(f"{name} {error(actual[name], expected[name]):.1e}" for name in expected))
    rounding, matrices = layer.matrices_in_e4m3(library)
    e4m3_forward, e4m3_backward, in_e4m3 = layer.in_e4m3(library, matrices)
    in_order(rounding + e4m3_forward + e4m3_backward)()
    torch.cuda.synchronize()
    print("  e4m3 against bf16: " + ", ".join(f"{name} {error(in_e4m3[name], expected[name]):.1e}" for name in expected))
    errors = layer.e4m3_errors(in_e4m3)
    print("  e4m3 against PyTorch's rounding: " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    permute, _ = layer.permutations(library, "bf16")
    permute_e4m3, rounded = layer.permutations(library, "e4m3")
    permuted_forward, permuted_backward, permuted = layer.in_e4m3(library, matrices, rounded)
    # The permutations write the layer's rows, so both forms read the same rows here.
    in_order(permute_e4m3 + permuted_forward + permuted_backward + e4m3_forward + e4m3_backward)()
    torch.cuda.synchronize()
    unequal = [name for name in permuted if not torch.equal(permuted[name], in_e4m3[name])]
    print(f"  e4m3 rounded by the permutation: {'bits differ in ' + ', '.join(unequal) if unequal else 'equal bits'}")
    permute_alone, rounded_alone = layer.permutations(library, "alone")
    alone_forward, alone_backward, alone_weights, alone = layer.in_e4m3_alone(library, matrices, rounded_alone)
    in_order(permute_alone[:1] + alone_forward + permute_alone[1:] + alone_backward)()
    torch.cuda.synchronize()
    unequal = [name for name in alone if not torch.equal(alone[name], in_e4m3[name])]
    print(f"  rows in e4m3 alone: {'bits differ in ' + ', '.join(unequal) if unequal else 'equal bits'}")
    compiled = torch.compile(layer.activation)
    leaves = [leaf.detach().requires_grad_() for leaf in (layer.x, layer.w1, layer.w2, layer.p)]

    def torch_runs(act):
        def forward_only():
            with torch.no_grad():
                layer.torch_forward(act, layer.x, layer.w1, layer.w2, layer.p)

        def whole():
            return torch.autograd.grad(layer.torch_forward(act, *leaves), leaves, layer.dy)

        def whole_added():
            _, dw1, dw2, _ = whole()
            layer.dw1.add_(dw1)
            layer.dw2.add_(dw2)

        return forward_only, whole, whole_added

    eager_forward, eager_all, eager_added = torch_runs(layer.activation)
    compiled_forward, compiled_all, compiled_added = torch_runs(compiled)
    first_weights = layer.weight_gradients(library, layer.dy, actual["hs"], actual["dz"], accumulate=0)
    e4m3_weights = layer.weight_gradients(library, layer.dy, actual["hs"], actual["dz"], recipe=1)
    rows = {
        "forward": {
            "separate": in_order(forward),
            "grouped_mlp": in_order(own_forward),
            "grouped_mlp, no z": in_order(inference),
            "in e4m3": in_order(e4m3_forward),
            "PyTorch": eager_forward,
            "PyTorch compiled": compiled_forward,
        },
        "backward": {
            "separate": in_order(backward),
            "grouped_mlp": in_order(own_backward),
            "in e4m3": in_order(e4m3_backward),
        },
        "forward and input gradient": {
            "grouped_mlp": in_order(own_forward + own_backward),
            "separate": in_order(forward + backward),
            "in e4m3": in_order(e4m3_forward + e4m3_backward),
            "in e4m3, matrices rounded every call": in_order(rounding + e4m3_forward + e4m3_backward),
        },
        "permutation, forward and input gradient": {
            "grouped_mlp": in_order(permute[:1] + own_forward + permute[1:] + own_backward),
            "separate": in_order(permute[:1] + forward + permute[1:] + backward),
            "in e4m3": in_order(permute[:1] + e4m3_forward + permute[1:] + e4m3_backward),
            "in e4m3, rounded by the permutation": in_order(permute_e4m3[:1] + permuted_forward + permute_e4m3[1:] + permuted_backward),
            "in e4m3, rows in e4m3 alone": in_order(permute_alone[:1] + alone_forward + permute_alone[1:] + alone_backward),
        },
        "permutation and all": {
            "grouped_mlp": in_order(permute[:1] + own_forward + permute[1:] + own_backward + own_weights),
            "in e4m3, gradients of weights in bf16": in_order(
                permute_e4m3[:1] + permuted_forward + permute_e4m3[1:] + permuted_backward + own_weights
            ),
            "in e4m3, gradients of weights too": in_order(
                permute_e4m3[:1] + permuted_forward + permute_e4m3[1:] + permuted_backward + e4m3_weights
            ),
            "in e4m3, rows in e4m3 alone": in_order(
                permute_alone[:1] + alone_forward + permute_alone[1:] + alone_backward + alone_weights
            ),
        },
        "all": {
            "separate": in_order(forward + backward + weights),
            "grouped_mlp": in_order(own_forward + own_backward + own_weights),
            "in e4m3": in_order(e4m3_forward + e4m3_backward + own_weights),
            "in e4m3, gradients of weights too": in_order(e4m3_forward + e4m3_backward + e4m3_weights),
            # As the first microbatch of a step does it, and PyTorch, whose gradients are new and in bf16.
            "grouped_mlp, gradients written": in_order(own_forward + own_backward + first_weights),
            "PyTorch": eager_all,
            "PyTorch compiled": compiled_all,
            # As Megatron-LM's main gradients need it.
            "PyTorch, gradients added to fp32": eager_added,
            "PyTorch compiled, gradients added to fp32": compiled_added,
        },
    }
    both = 2 * flops
    work = {"forward": flops, "backward": flops, "forward and input gradient": both, "all": 3 * flops}
    work["permutation, forward and input gradient"] = both
    work["permutation and all"] = 3 * flops
    for part, contenders in rows.items():
        if options.without_pytorch:
            contenders = {name: run for name, run in contenders.items() if "PyTorch" not in name}
        times = compare(contenders)
        own = statistics.median(times["grouped_mlp"])
        for name, values in times.items():
            middle, tenths = statistics.median(values), statistics.quantiles(values, n=10)
            print(
                f"  {part:9} {name:18} {middle:8.4f} ms ({tenths[0]:.4f} to {tenths[-1]:.4f})  "
                f"{work[part] / middle / 1e9:6.0f} TFLOP/s  {middle / own:5.3f} x the time of grouped_mlp",
                flush=True,
            )
            result.append({"layer": layer.sizes, "part": part, "contender": name, "milliseconds": values})
    if options.kernels:
        kernels("separate", in_order(forward + backward + weights))
        kernels("grouped_mlp", in_order(own_forward + own_backward + own_weights))
    del layer, leaves, forward, backward, weights, own_forward, own_backward, own_weights, first_weights, e4m3_weights, inference, rows, contenders
    del alone_forward, alone_backward, alone_weights, alone, permute, permute_e4m3, permute_alone
    del expected, actual
    torch.cuda.empty_cache()
if options.json:
    pathlib.Path(options.json).write_text(json.dumps(result, indent=1))
