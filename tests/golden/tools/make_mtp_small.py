"""Makes a small mtp-*-small reference folder from its config.json with a float64 engine, or holds the engine to Megatron-LM's.

    python make_mtp_small.py FOLDER ...             (needs autograd and numpy)
    python make_mtp_small.py --check FOLDER ...     prints the worst relative differences from FOLDER/golden.json

The engine is plain numpy with reverse-mode differentiation by autograd, one process, no layouts, written from the formulas of the
specification. FOLDER/config.json has the fields of Megatron-LM's mtp-* folders; weights and batches are drawn from its seed.
"""
import argparse
import json
import math
import os
import struct

import autograd.numpy as np
import numpy
from autograd import value_and_grad
from autograd.tracer import getval

KINDS = {"F32": numpy.float32, "I32": numpy.int32, "U8": numpy.uint8}
HEAD = 6


def load(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    header.pop("__metadata__", None)
    return {
        name: numpy.frombuffer(data[slice(*e["data_offsets"])], KINDS[e["dtype"]]).reshape(e["shape"])
        for name, e in header.items()
    }


def save(path, tensors):
    header, blob = {}, b""
    for name, value in sorted(tensors.items()):
        kind = next(k for k, dtype in KINDS.items() if dtype == value.dtype)
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(blob), len(blob) + value.nbytes]}
        blob += value.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + blob)


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - np.max(x, -1, keepdims=True))
    return e / np.sum(e, -1, keepdims=True)


def logsumexp(x):
    top = np.max(x, -1, keepdims=True)
    return (np.log(np.sum(np.exp(x - top), -1, keepdims=True)) + top)[..., 0]


def chosen(key, count):
    """One-hot sums of the `count` largest, and the smallest distance between a chosen and a rejected value."""
    order = numpy.argsort(-key, -1, kind="stable")
    hot = numpy.zeros_like(key)
    numpy.put_along_axis(hot, order[:, :count], 1.0, -1)
    ranked = numpy.take_along_axis(key, order, -1)
    return hot, (ranked[:, count - 1] - ranked[:, count]).min() if count < key.shape[1] else math.inf


def rolled(x, shift):
    """x [B, S] moved left, zeros from the right."""
    return numpy.concatenate([x[:, shift:], numpy.zeros_like(x[:, :shift])], 1)


class Engine:
    def __init__(self, config):
        self.c, self.t = config, config["transformer_config"]
        self.main, *depths = config["pattern"].split("/")
        self.depths, self.depth = len(depths), depths[0]
        self.repeated = self.t.get("mtp_use_repeated_layer", False)
        self.per_token = self.t.get("calculate_per_token_loss", False)

    def mamba(self, x, p):
        t, w, (batch, seq, _) = self.t, self.w, x.shape
        heads, width, groups, state = (t[f"mamba_{k}"] for k in ("num_heads", "head_dim", "num_groups", "state_dim"))
        inner, bc = heads * width, groups * state
        y = rms(x, w[p + "in_proj.layer_norm_weight"], self.eps) @ w[p + "in_proj.weight"].T
        z, xbc, dt = y[..., :inner], y[..., inner : 2 * inner + 2 * bc], y[..., 2 * inner + 2 * bc :]
        taps = w[p + "conv1d_weight"].shape[2]
        padded = np.concatenate([numpy.zeros((batch, taps - 1, xbc.shape[2])), xbc], 1)
        conv = sum(padded[:, k : k + seq] * w[p + "conv1d_weight"][:, 0, k] for k in range(taps)) + w[p + "conv1d_bias"]
        conv = conv * sigmoid(conv)
        u = conv[..., :inner].reshape(batch, seq, heads, width)
        of_head = numpy.arange(heads) // (heads // groups)
        b = conv[..., inner : inner + bc].reshape(batch, seq, groups, state)[:, :, of_head]
        c = conv[..., inner + bc :].reshape(batch, seq, groups, state)[:, :, of_head]
        step = dt + w[p + "dt_bias"]
        delta = np.log1p(np.exp(-np.abs(step))) + np.maximum(step, 0)
        decay = np.cumsum(delta * -np.exp(w[p + "A_log"]), 1)
        lower = numpy.tril(numpy.ones((seq, seq)))[None, :, :, None]
        # exp of what stands above the diagonal would overflow.
        spans = np.exp((decay[:, :, None] - decay[:, None]) * lower) * lower
        mixed = np.einsum("bihn,bjhn->bijh", c, b) * spans * delta[:, None]
        o = np.einsum("bijh,bjhp->bihp", mixed, u) + w[p + "D"][:, None] * u
        o = o.reshape(batch, seq, inner) * (z * sigmoid(z))
        o = o.reshape(batch, seq, groups, inner // groups)
        o = o / np.sqrt(np.mean(o * o, -1, keepdims=True) + 1e-5)
        return (o.reshape(batch, seq, inner) * w[p + "norm.weight"]) @ w[p + "out_proj.weight"].T

    def attention(self, x, p):
        t, w, (batch, seq, _) = self.t, self.w, x.shape
        heads, groups, width = t["num_attention_heads"], t["num_query_groups"], t["kv_channels"]
        y = rms(x, w[p + "linear_qkv.layer_norm_weight"], self.eps) @ w[p + "linear_qkv.weight"].T
        y = y.reshape(batch, seq, groups, heads // groups + 2, width)
        q = y[:, :, :, :-2].reshape(batch, seq, heads, width)
        of_head = numpy.arange(heads) // (heads // groups)
        k, v = y[:, :, of_head, -2], y[:, :, of_head, -1]
        scores = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(width)
        scores = np.where(numpy.tril(numpy.ones((seq, seq), bool)), scores, -1e30)
        o = np.einsum("bhij,bjhd->bihd", softmax(scores), v).reshape(batch, seq, heads * width)
        return o @ w[p + "linear_proj.weight"].T

    def mlp(self, x, p):
        w = self.w
        y = rms(x, w[p + "linear_fc1.layer_norm_weight"], self.eps) @ w[p + "linear_fc1.weight"].T
        return np.maximum(y, 0) ** 2 @ w[p + "linear_fc2.weight"].T

    def moe(self, x, p, passes):
        t, w, (batch, seq, hidden) = self.t, self.w, x.shape
        u = rms(x, w[p + "pre_mlp_layernorm.weight"], self.eps).reshape(-1, hidden)
        p += "mlp."
        experts, k = t["num_moe_experts"], t["moe_router_topk"]
        logits = u @ w[p + "router.weight"].T
        scores = sigmoid(logits)
        picked, gap = chosen(getval(scores) + self.bias[p + "router.expert_bias"], k)
        self.gap = min(self.gap, gap)
        weights = scores * picked
        weights = weights / (np.sum(weights, -1, keepdims=True) + 1e-20) * t["moe_router_topk_scaling_factor"]
        self.counts[p + "router.expert_bias"] = self.counts.get(p + "router.expert_bias", 0) + picked.sum(0)
        if t["moe_router_load_balancing_type"] == "seq_aux_loss":
            shares = scores / (np.sum(scores, -1, keepdims=True) + 1e-20)
            frequent, gap = chosen(getval(shares), k)
            self.gap = min(self.gap, gap)
            of_sequence = np.sum(shares.reshape(batch, seq, experts), 1) * frequent.reshape(batch, seq, experts).sum(1)
            balance = np.sum(of_sequence) * experts / (k * seq * seq * batch)
            self.routers = self.routers + t["moe_aux_loss_coeff"] * balance / passes
        z = np.mean(logsumexp(logits) ** 2)
        self.routers = self.routers + (t.get("moe_z_loss_coeff") or 0) * z / passes
        y = np.maximum(u @ w[p + "shared_experts.linear_fc1.weight"].T, 0) ** 2 @ w[p + "shared_experts.linear_fc2.weight"].T
        for e in range(experts):
            act = np.maximum(u @ w[p + f"experts.linear_fc1.weight{e}"].T, 0) ** 2
            y = y + (act * weights[:, e : e + 1]) @ w[p + f"experts.linear_fc2.weight{e}"].T
        return y.reshape(batch, seq, hidden)

    def layer(self, symbol, x, p, passes=1):
        if symbol == "M":
            return x + self.mamba(x, p + "mixer.")
        if symbol == "*":
            return x + self.attention(x, p + "self_attention.")
        if symbol == "-":
            return x + self.mlp(x, p + "mlp.")
        return x + self.moe(x, p, passes)

    def losses(self, x, labels):
        logits = self.seen("logits", x @ self.w["output_layer.weight"].T)
        rows = logits.reshape(-1, logits.shape[-1])
        return (logsumexp(rows) - rows[numpy.arange(len(rows)), labels.reshape(-1)]).reshape(labels.shape)

    def seen(self, name, value):
        """Records a value under its name, with one ' more for every further call."""
        while name in self.probe:
            name += "'"
        self.probe[name] = getval(value)
        return value

    def microbatch(self, ids, labels, mask):
        """Loss sums and token counts of the next token and of every depth, in this order."""
        w, emb = self.w, self.w["embedding.word_embeddings.weight"]
        x = self.seen("embedding", emb[ids])
        for i, symbol in enumerate(self.main):
            x = self.seen(f"decoder.layers.{i}", self.layer(symbol, x, f"decoder.layers.{i}."))
        x = normed = self.seen("decoder.final_norm", rms(x, w["decoder.final_norm.weight"], self.eps))
        terms = []
        for k in range(1, self.depths + 1):
            p = f"mtp.layers.{0 if self.repeated else k - 1}."
            later = rms(self.seen("embedding", emb[rolled(ids, k)]), w[p + "enorm.weight"], self.eps)
            y = np.concatenate([later, rms(x, w[p + "hnorm.weight"], self.eps)], -1)
            y = self.seen(p + "eh_proj", y @ w[p + "eh_proj.weight"].T)
            for j, symbol in enumerate(self.depth):
                name = f"{p}mtp_model_layer.layers.{j}"
                y = self.seen(name, self.layer(symbol, y, name + ".", self.depths if self.repeated else 1))
            x = self.seen(p + "final_layernorm", rms(y, w[p + "final_layernorm.weight"], self.eps))
            weights = rolled(mask, k)
            terms.append((np.sum(self.losses(x, rolled(labels, k)) * weights), weights.sum()))
        return [(np.sum(self.losses(normed, labels) * mask), mask.sum()), *terms]

    def objective(self, weights, tokens, masks):
        """What a step differentiates (docs/spec/language-model.md §4.4, §5.4; docs/spec/runtime.md §3.3)."""
        self.w, self.eps = weights, self.c["layernorm_epsilon"]
        self.probe, self.counts, self.gap, self.values = {}, {}, math.inf, []
        total = 0
        for ids, mask in zip(tokens, masks):
            self.routers = 0
            (loss, n), *depths = self.microbatch(ids[:, :-1], ids[:, 1:], mask.astype(float))
            self.values.append([(float(getval(sum_)), count) for sum_, count in [(loss, n), *depths]])
            mean = loss / n + self.t["mtp_loss_scaling_factor"] / self.depths * sum(d / count for d, count in depths)
            share = (n, mask.size) if self.per_token else (1, 1)
            total = total + share[0] * mean + share[1] * self.routers
        return total / (masks.sum() if self.per_token else len(masks))

    def train(self, weights, batches, optimizer, steps):
        o, (b1, b2) = optimizer, optimizer["betas"]
        self.bias = {k: v.astype(float) for k, v in weights.items() if k.endswith("expert_bias")}
        w = {k: v.astype(float) for k, v in weights.items() if k not in self.bias}
        moments = {k: (numpy.zeros_like(v), numpy.zeros_like(v)) for k, v in w.items()}
        for step in range(1, steps + 1):
            tokens, masks = batches["tokens"][step - 1], batches["loss_mask"][step - 1]
            _, gradients = value_and_grad(lambda w: self.objective(w, tokens, masks))(w)
            norms = {k: float(numpy.sqrt((g * g).sum())) for k, g in gradients.items()}
            norm = math.sqrt(sum(n * n for n in norms.values()))
            yield step, norm, norms
            clip = min(1.0, o["clip_grad"] / (norm + 1e-6))
            for k, g in gradients.items():
                m, v = moments[k]
                m[:] = b1 * m + (1 - b1) * g * clip
                v[:] = b2 * v + (1 - b2) * (g * clip) ** 2
                decay = 0 if k in o["no_weight_decay"] else o["weight_decay"]
                scaled = (m / (1 - b1**step)) / (numpy.sqrt(v / (1 - b2**step)) + o["eps"])
                w[k] = w[k] - o["lr"] * (decay * w[k] + scaled)
            for k, counts in self.counts.items():
                self.bias[k] += self.t["moe_router_bias_update_rate"] * numpy.sign(counts.mean() - counts)

    def step_values(self):
        per = [losses[0][0] / losses[0][1] for losses in self.values]
        tokens = [int(losses[0][1]) for losses in self.values]
        depths = [[losses[1 + d] for losses in self.values] for d in range(self.depths)]
        return {
            "loss": float(numpy.dot(per, tokens) / sum(tokens)),
            "loss_per_microbatch": per,
            "loss_tokens": sum(tokens),
            "mtp_loss": [float(numpy.mean([s / n for s, n in of])) for of in depths],
        }


def shapes(c, engine):
    t, h = c["transformer_config"], c["transformer_config"]["hidden_size"]
    inner = t["mamba_num_heads"] * t["mamba_head_dim"]
    channels = inner + 2 * t["mamba_num_groups"] * t["mamba_state_dim"]
    queries = t["num_attention_heads"] * t["kv_channels"]
    f, e, s = t["moe_ffn_hidden_size"], t["num_moe_experts"], t["moe_shared_expert_intermediate_size"]

    def of_layer(symbol):
        if symbol == "M":
            heads = t["mamba_num_heads"]
            return {f"mixer.{k}": (heads,) for k in ("A_log", "D", "dt_bias")} | {
                "mixer.conv1d_bias": (channels,), "mixer.conv1d_weight": (channels, 1, c["fixed"]["conv_width"]),
                "mixer.in_proj.layer_norm_weight": (h,), "mixer.in_proj.weight": (inner + channels + heads, h),
                "mixer.norm.weight": (inner,), "mixer.out_proj.weight": (h, inner),
            }
        if symbol == "*":
            return {
                "self_attention.linear_qkv.layer_norm_weight": (h,), "self_attention.linear_proj.weight": (h, queries),
                "self_attention.linear_qkv.weight": (queries + 2 * t["num_query_groups"] * t["kv_channels"], h),
            }
        if symbol == "-":
            width = t["ffn_hidden_size"]
            return {"mlp.linear_fc1.layer_norm_weight": (h,), "mlp.linear_fc1.weight": (width, h), "mlp.linear_fc2.weight": (h, width)}
        names = {"pre_mlp_layernorm.weight": (h,), "mlp.router.weight": (e, h), "mlp.router.expert_bias": (e,)}
        for i in range(e):
            names |= {f"mlp.experts.linear_fc1.weight{i}": (f, h), f"mlp.experts.linear_fc2.weight{i}": (h, f)}
        return names | {"mlp.shared_experts.linear_fc1.weight": (s, h), "mlp.shared_experts.linear_fc2.weight": (h, s)}

    vocabulary = (c["vocab_size"], h)
    all_ = {"embedding.word_embeddings.weight": vocabulary, "output_layer.weight": vocabulary, "decoder.final_norm.weight": (h,)}
    for i, symbol in enumerate(engine.main):
        all_ |= {f"decoder.layers.{i}.{k}": shape for k, shape in of_layer(symbol).items()}
    for k in range(1 if engine.repeated else engine.depths):
        p = f"mtp.layers.{k}."
        all_ |= {p + f"{norm}.weight": (h,) for norm in ("enorm", "hnorm", "final_layernorm")} | {p + "eh_proj.weight": (h, 2 * h)}
        for j, symbol in enumerate(engine.depth):
            all_ |= {f"{p}mtp_model_layer.layers.{j}.{k}": shape for k, shape in of_layer(symbol).items()}
    return all_


def draw(c, engine):
    """Weights, unlike the usual ones and zeros also for norms and biases, and batches whose masks have gaps."""
    random = numpy.random.default_rng(c["seed"])
    weights = {}
    for name, shape in shapes(c, engine).items():
        value = random.standard_normal(shape)
        if name.endswith("expert_bias"):
            value = numpy.linspace(-0.05, 0.05, shape[0])
        elif name.endswith("A_log"):
            value = numpy.log(1 + random.random(shape) * 8)
        elif name.endswith(("norm.weight", "layernorm.weight", "norm_weight", ".D")):
            value = 1 + 0.1 * value
        elif len(shape) == 1:
            value = 0.3 * value
        elif "embeddings" not in name:
            value = value / math.sqrt(math.prod(shape[1:]))
        weights[name] = value.astype(numpy.float32)
    of = [c["steps"], c["microbatches"], c["batch"], c["seq"]]
    kept = numpy.array([[0.3, 0.9, 0.6, 1.0][(s + m) % 4] for s in range(of[0]) for m in range(of[1])]).reshape(*of[:2], 1, 1)
    tokens = random.integers(0, c["vocab_size"], [*of[:3], of[3] + 1]).astype(numpy.int32)
    return weights, {"tokens": tokens, "loss_mask": (random.random(of) < kept).astype(numpy.uint8)}


def probe(value):
    value = value.astype(float)
    stats = {"mean": value.mean(), "rms": numpy.sqrt((value * value).mean()), "absmax": numpy.abs(value).max()}
    return {k: float(v) for k, v in stats.items()} | {"head": value.reshape(-1)[:HEAD].tolist()}


def make(folder):
    c = json.load(open(os.path.join(folder, "config.json")))
    engine = Engine(c)
    weights, batches = draw(c, engine)
    flat = sorted(k for k, v in weights.items() if v.ndim == 1 and not k.endswith("expert_bias"))
    c["no_weight_decay"] = flat
    json.dump(c, open(os.path.join(folder, "config.json"), "w"), indent=1)
    optimizer = {
        "name": "AdamW", "schedule": "constant", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6,
        "clip_grad": 1.0, "no_weight_decay": flat,
    }
    steps, first, gap = [], None, math.inf
    for step, norm, norms in engine.train(weights, batches, optimizer, c["steps"]):
        bands = {f"{k}_band": 0.0 for k in ("loss", "mtp_loss", "grad_norm")}
        steps.append({"step": step, **engine.step_values(), "grad_norm": norm, **bands})
        first = first or {"layers": {k: probe(v) for k, v in engine.probe.items()}, "grad_norm": norms}
        gap = min(gap, engine.gap)
    save(os.path.join(folder, "model.safetensors"), weights)
    save(os.path.join(folder, "batches.safetensors"), batches)
    golden = {
        "source": "float64 engine: tests/golden/tools/make_mtp_small.py",
        "dtype": "float64",
        "optimizer": optimizer,
        "loss": "mean cross-entropy over unmasked targets of the step",
        "mtp_loss": "per depth: mean over microbatches of (sum of masked losses / unmasked rolled targets), before the factor",
        "exact_steps": len(steps),
        "router_margin": float(gap),
        "steps": steps,
        "expert_bias_after_last_step": {k: v.tolist() for k, v in engine.bias.items()},
        "step1_probe": first,
    }
    json.dump(golden, open(os.path.join(folder, "golden.json"), "w"), indent=1)
    print(f"{folder}: {len(steps)} steps, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}, router margin {gap:.1e}")


def check(folder, limit):
    c, golden = (json.load(open(os.path.join(folder, name))) for name in ("config.json", "golden.json"))
    engine = Engine(c)
    weights, batches = (load(os.path.join(folder, name)) for name in ("model.safetensors", "batches.safetensors"))
    worst = {}

    def compare(what, actual, expected):
        off = abs(actual - expected) / abs(expected) if expected else abs(actual)
        worst[what] = max(worst.get(what, 0), off)

    for step, norm, norms in engine.train(weights, batches, golden["optimizer"], min(limit, len(golden["steps"]))):
        expected, own = golden["steps"][step - 1], engine.step_values()
        compare("loss", own["loss"], expected["loss"])
        for name in ("loss_per_microbatch", "mtp_loss"):
            for a, b in zip(own[name], expected[name], strict=True):
                compare(name, a, b)
        compare("grad_norm", norm, expected["grad_norm"])
        if step > 1:
            continue
        for name, wanted in golden["step1_probe"]["grad_norm"].items():
            compare("gradient norms", norms[name], wanted)
        for name, wanted in golden["step1_probe"]["layers"].items():
            if name in engine.probe:
                compare("rms of probes", probe(engine.probe[name])["rms"], wanted["rms"])
    print(folder, {what: f"{off:.1e}" for what, off in worst.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="of --check")
    parser.add_argument("folders", nargs="+")
    options = parser.parse_args()
    for folder in options.folders:
        check(folder, options.steps) if options.check else make(folder)
