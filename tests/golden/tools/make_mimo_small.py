"""Makes a small mimo-*-small reference folder from its config.json, with the float64 engine of check_mimo.py.

    python make_mimo_small.py FOLDER ...      (needs torch, numpy and safetensors)

FOLDER/config.json has the fields of a mimo-* folder and `small.seed`. The script draws weights and batches from that seed,
trains in float64 and writes model.safetensors, batches.safetensors and golden.json in the form of Megatron-LM's reference
runs: the engine agrees with those to 1.3e-7. Weights and batches are float32 and int32, so that every engine starts
from the same bits; norms and biases are drawn too, unlike upstream's ones and zeros, so that a misplaced one shows.
"""
import json
import math
import sys

import torch
from safetensors.torch import save_file

import check_mimo
from check_mimo import DT, Model, image, write_bands

TOWER = "modality_submodules.radio_encoder.encoders.radio_encoder.radio_model."


def parameter_shapes(c):
    """Logical names and shapes of every parameter and of the router's bias, as Megatron-LM names them."""
    l, v = c["language_model"], c["vision"]
    h, names = l["hidden_size"], {}
    a, m, e = l["attention"], l["mamba"], l["moe"]
    for i, symbol in enumerate(l["pattern"]):
        p = f"language_model.decoder.layers.{i}."
        if symbol == "M":
            channels = m["d_inner"] + 2 * m["num_groups"] * m["state_dim"]
            p += "mixer."
            names |= {
                p + "A_log": (m["num_heads"],), p + "D": (m["num_heads"],), p + "dt_bias": (m["num_heads"],),
                p + "conv1d_bias": (channels,), p + "conv1d_weight": (channels, 1, m["conv_kernel"]),
                p + "in_proj.layer_norm_weight": (h,), p + "in_proj.weight": (m["d_inner"] + channels + m["num_heads"], h),
                p + "norm.weight": (m["d_inner"],), p + "out_proj.weight": (h, m["d_inner"]),
            }
        elif symbol == "*":
            p += "self_attention."
            rows = (a["num_attention_heads"] + 2 * a["num_query_groups"]) * a["kv_channels"]
            names |= {
                p + "linear_qkv.layer_norm_weight": (h,), p + "linear_qkv.weight": (rows, h),
                p + "linear_proj.weight": (h, a["num_attention_heads"] * a["kv_channels"]),
            }
        elif symbol == "E":
            f, s = e["ffn_hidden_size"], e["shared_expert_hidden_size"]
            names |= {p + "pre_mlp_layernorm.weight": (h,)}
            p += "mlp."
            for expert in range(e["num_experts"]):
                names |= {p + f"experts.linear_fc1.weight{expert}": (f, h), p + f"experts.linear_fc2.weight{expert}": (h, f)}
            names |= {
                p + "router.expert_bias": (e["num_experts"],), p + "router.weight": (e["num_experts"], h),
                p + "shared_experts.linear_fc1.weight": (s, h), p + "shared_experts.linear_fc2.weight": (h, s),
            }
        else:
            f = l["mlp"]["ffn_hidden_size"]
            p += "mlp."
            names |= {p + "linear_fc1.layer_norm_weight": (h,), p + "linear_fc1.weight": (f, h), p + "linear_fc2.weight": (h, f)}
    names |= {
        "language_model.decoder.final_norm.weight": (h,),
        "language_model.embedding.word_embeddings.weight": (l["padded_vocab_size"], h),
        "language_model.output_layer.weight": (l["padded_vocab_size"], h),
    }
    w, f = v["hidden_size"], v["ffn_hidden_size"]
    names |= {
        TOWER + "class_token": (v["class_tokens"], w), TOWER + "embedder.weight": (w, 3 * v["patch_size"] ** 2),
        TOWER + "position_embeddings": tuple(v["position_table"]["parameter_shape"]),
        TOWER + "decoder.final_layernorm.weight": (w,), TOWER + "decoder.final_layernorm.bias": (w,),
        c["projector"]["parameter"]: (c["projector"]["output_size"], c["projector"]["input_size"]),
    }
    for i in range(v["num_layers"]):
        p = f"{TOWER}decoder.layers.{i}."
        for linear, rows, columns in (
            ("self_attention.linear_qkv", 3 * w, w), ("self_attention.linear_proj", w, w),
            ("mlp.linear_fc1", f, w), ("mlp.linear_fc2", w, f),
        ):
            names |= {f"{p}{linear}.weight": (rows, columns), f"{p}{linear}.bias": (rows,)}
            if linear in ("self_attention.linear_qkv", "mlp.linear_fc1"):
                names |= {f"{p}{linear}.layer_norm_weight": (w,), f"{p}{linear}.layer_norm_bias": (w,)}
    return dict(sorted(names.items()))


def draw_weights(c, generator):
    weights = {}
    for name, shape in parameter_shapes(c).items():
        normal = torch.randn(shape, generator=generator, dtype=DT)
        last = name.rsplit(".", 1)[-1]
        if last == "expert_bias":
            value = torch.zeros(shape, dtype=DT)
        elif last == "A_log":
            value = torch.log(1 + 15 * torch.rand(shape, generator=generator, dtype=DT))
        elif last == "dt_bias":
            value = -4 + normal
        elif last == "D" or last == "layer_norm_weight" or "norm.weight" in name:
            value = 1 + 0.1 * normal
        elif last.endswith("bias"):
            value = 0.1 * normal
        elif last == "class_token":
            value = normal
        elif last.startswith("conv1d_weight"):
            value = 0.3 * normal
        else:
            value = normal * 0.5 / math.sqrt(shape[-1])
        weights[name] = value.float()
    return weights


def draw_batches(c, generator):
    """Token ids with the images' places, the shifted labels and the mask, as upstream's mock data has them."""
    d, l, v = c["data"], c["language_model"], c["vision"]
    shape = (d["steps"], d["lanes"], d["microbatches_per_lane"], l["sequence_length"])
    ids = torch.randint(0, l["vocab_size"] - 1, shape, generator=generator)
    ids[ids >= l["image_token_id"]] += 1
    text_only = {tuple(x) for x in d.get("text_only", {}).get("samples", [])}
    has = torch.ones(shape[:3], dtype=torch.uint8)
    for step, lane, microbatch in text_only:
        has[step - 1, lane, microbatch - 1] = 0
    n = v["tokens_per_sample"]
    ids[..., :n] = torch.where(has[..., None].bool(), l["image_token_id"], ids[..., :n])
    labels = torch.roll(ids, -1, -1)
    labels[..., -1] = -100
    labels[labels == l["image_token_id"]] = -100
    labels[..., : n - 1] = torch.where(has[..., None].bool(), -100, labels[..., : n - 1])
    batches = {"input_ids": ids.int(), "labels": labels.int(), "loss_mask": (labels != -100).to(torch.uint8)}
    first = [image(c, lane, i) * has[0, lane, i] for lane in range(d["lanes"]) for i in range(d["microbatches_per_lane"])]
    batches["images"] = torch.stack(first).view(1, d["lanes"], d["microbatches_per_lane"], *d["image_shape"])
    if text_only:
        batches["has_image"] = has
    if v["resolution"] == "dynamic":
        batches["image_sizes"] = torch.tensor([[v["image_height"], v["image_width"]]], dtype=torch.int32)
    return batches


def statistics(t, shape=None):
    t = t.detach()
    return {
        "shape": list(shape or t.shape), "mean": float(t.mean()), "rms": float(t.pow(2).mean().sqrt()),
        "absmax": float(t.abs().max()), "head": [float(x) for x in t.flatten()[:6]],
    }


def train(c, weights, batches, policy, after=None):
    """Trains as check_mimo.check does and returns what a golden.json records of it; after(step, model, moments) sees each step's end."""
    d, o, l = c["data"], c["optimizer"], c["language_model"]
    lanes, per_lane, length = d["lanes"], d["microbatches_per_lane"], l["sequence_length"]
    text_only = {tuple(x) for x in d.get("text_only", {}).get("samples", [])}
    model = Model(c, weights)
    moments = {k: (torch.zeros_like(w), torch.zeros_like(w)) for k, w in model.w.items()}
    steps, probe = [], None
    for s in range(d["steps"]):
        ids, labels, mask = (batches[k][s].reshape(lanes * per_lane, length) for k in ("input_ids", "labels", "loss_mask"))
        has = [(s + 1, lane, i + 1) not in text_only for lane in range(lanes) for i in range(per_lane)]
        places = [(lane, i) for lane in range(lanes) for i in range(per_lane) if has[lane * per_lane + i]]
        images = torch.stack([image(c, lane, s * per_lane + i) for lane, i in places])
        loss, rec = model.forward(ids.long(), labels.long(), mask, images)
        tokens = int(mask.sum())
        coefficient = l["moe"]["aux_loss_coefficient"]
        balancing = {p.split(".")[3]: float(aux.sum()) / coefficient / (lanes * per_lane) for p, aux in rec["aux"]}
        value = (loss * mask).sum() / tokens
        for w in model.w.values():
            w.grad = None
        (value + sum(aux.sum() for _, aux in rec["aux"]) * length / tokens).backward()
        served = c["layout"]["encoder"]["data_parallel"]
        took_part = len({lane * served // lanes for lane in range(lanes) if any(has[lane * per_lane : (lane + 1) * per_lane])})
        if policy == "corrected":
            for k, w in model.w.items():
                if k.startswith("modality_submodules."):
                    w.grad *= served / took_part
        norms = {k: float(w.grad.norm()) for k, w in model.w.items()}
        norm = math.sqrt(sum(x * x for x in norms.values()))
        step = {
            "step": s + 1, "loss": value.item(), "grad_norm": norm,
            "seq_load_balancing_loss": sum(balancing.values()) / len(balancing), "seq_load_balancing_loss_layers": balancing,
            "lr": o["lr"], "loss_tokens": tokens,
        }
        if text_only:
            step["participants"] = took_part
        steps.append(step)
        for p, _ in rec["aux"]:
            count = rec[p + "router.map"].sum((0, 1))
            model.bias[p + "router.expert_bias"] += l["moe"]["router_bias_update_rate"] * torch.sign(count.mean() - count)
        if s == 0:
            probe = first_step(c, rec, ids, model, norms)
        scale = min(1.0, o["clip_grad"] / (norm + 1e-6))
        with torch.no_grad():
            for k, w in model.w.items():
                m1, m2 = moments[k]
                gradient = w.grad * scale
                m1.mul_(o["betas"][0]).add_(gradient, alpha=1 - o["betas"][0])
                m2.mul_(o["betas"][1]).addcmul_(gradient, gradient, value=1 - o["betas"][1])
                w.mul_(1 - o["lr"] * (0.0 if k in o["no_weight_decay"] else o["weight_decay"]))
                second = (m2 / (1 - o["betas"][1] ** (s + 1))).sqrt().add_(o["eps"])
                w.addcdiv_(m1 / (1 - o["betas"][0] ** (s + 1)), second, value=-o["lr"])
        if after is not None:
            after(s + 1, model, moments)
    return steps, probe


def first_step(c, rec, ids, model, norms):
    """Activations of every lane's first microbatch, routing, and gradient norms of step 1."""
    d, l = c["data"], c["language_model"]
    lanes, per_lane = d["lanes"], d["microbatches_per_lane"]
    emb = model.w["language_model.embedding.word_embeddings.weight"]
    found = []
    for lane in range(lanes):
        at, entries = lane * per_lane, {}
        for name, value in rec.items():
            if name in ("aux", "logits", "lm.embedding"):
                continue
            if name.endswith("router.map"):
                counts = value[at].sum(0)
                entries[name] = {"shape": list(value[at].shape), "tokens_per_expert": [int(x) for x in counts]}
            else:
                entries[name] = statistics(value[at])
        # The embedding is read before the step's update: the caller has not changed the weights yet.
        entries["lm.embedding"] = statistics(emb[ids[at][ids[at] != l["image_token_id"]].long()])
        found.append(dict(sorted(entries.items())))
    routers = [p + "router" for p, _ in rec["aux"]]
    return {
        "about": "step 1, microbatch 1 of every lane; shapes are those of the engine, one sample without a batch axis; head = first 6 values",
        "lanes": found,
        "logits_lanes": [statistics(rec["logits"][lane * per_lane]) for lane in range(lanes)],
        "tokens_per_expert": {r: rec[r + ".map"].sum(1).view(lanes, per_lane, -1).int().tolist() for r in routers},
        "expert_bias_after_step1": {r + ".expert_bias": model.bias[r + ".expert_bias"].tolist() for r in routers},
        "grad_norm": norms,
    }


def rounded(value):
    """Floats to 12 digits: more than any comparison asks for, and the same text from every machine."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return {k: rounded(x) for k, x in value.items()} if isinstance(value, dict) else value


def make(folder):
    with open(f"{folder}/config.json") as file:
        c = json.load(file)
    generator = torch.Generator().manual_seed(c["small"]["seed"])
    weights, batches = draw_weights(c, generator), draw_batches(c, generator)
    save_file(weights, f"{folder}/model.safetensors")
    save_file(batches, f"{folder}/batches.safetensors")
    steps, probe = train(c, weights, batches, c.get("encoder_grad_participation", "exact"))
    golden = {
        "source": "the float64 engine of tests/golden/tools, in the form of runs of Megatron-LM's examples/mimo/pretrain_mimo.py",
        "dtype": "float32",
        "computed_in": "float64",
        "loss": "sum of masked token losses of the step over all lanes and microbatches / number of loss-mask tokens",
        "steps": steps,
        "step1_probe": probe,
    }
    with open(f"{folder}/golden.json", "w") as file:
        json.dump(rounded(golden), file)
    write_bands(folder)
    with open(f"{folder}/golden.json") as file:
        golden = rounded(json.load(file))
    with open(f"{folder}/golden.json", "w") as file:
        json.dump(golden, file, indent="\t")
        file.write("\n")


if __name__ == "__main__":
    check_mimo.torch.set_num_threads(1)
    for name in sys.argv[1:]:
        make(name.rstrip("/"))
