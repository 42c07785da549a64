"""Makes tests/golden/torch-dist-small: a torch_dist checkpoint in Megatron-LM's keys, written by PyTorch itself.

    python make_torch_dist_small.py RUN TARGET      (needs torch >= 2.6, numpy and safetensors)

RUN is a mimo-*-small folder. The float64 engine trains its first three steps; two processes then save weights, moments and
master weights (float32) through torch.distributed.checkpoint, tensor-parallel tensors as two shards, the rest by one rank.
TARGET/tensors.json lists the SHA-256 of every tensor as PyTorch loads it again, and of the logical tensors before they were cut.
"""
import argparse
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import make_mimo_small

STEPS = 3
LANGUAGE = "language_model."
TOWER = "modality_submodules.radio_encoder."


def trained(run):
    """Logical tensors after the first steps: the parameters, and by state those of the optimizer."""
    with open(f"{run}/config.json") as file:
        c = json.load(file)
    c["data"]["steps"] = STEPS
    found = {}

    def after(step, model, moments):
        if step != STEPS:
            return
        found["param"] = {k: w.detach().float() for k, w in model.w.items()}
        found["exp_avg"] = {k: m[0].float() for k, m in moments.items()}
        found["exp_avg_sq"] = {k: m[1].float() for k, m in moments.items()}
        found["buffer"] = {k: b.float() for k, b in model.bias.items()}

    batches = {k: v[:STEPS] for k, v in load_file(f"{run}/batches.safetensors").items()}
    make_mimo_small.train(c, load_file(f"{run}/model.safetensors"), batches, "exact", after)
    return c, found


def megatron_keys(c, tensors):
    """Megatron-LM's keys: a `module.` segment, tower layers and experts stacked, in_proj and conv1d cut into parts."""
    m = c["language_model"]["mamba"]
    inner, state = m["d_inner"], m["num_groups"] * m["state_dim"]
    cuts = {
        "in_proj.weight": ("in_proj.weight", dict(z=inner, x=inner, B=state, C=state, dt=m["num_heads"])),
        "conv1d_weight": ("conv1d.weight", dict(x=inner, B=state, C=state)),
        "conv1d_bias": ("conv1d.bias", dict(x=inner, B=state, C=state)),
    }
    keys, stacks = {}, {}
    for name, value in tensors.items():
        root = LANGUAGE if name.startswith(LANGUAGE) else TOWER
        key = root + "module." + name[len(root):]
        last = name.rsplit("mixer.", 1)[-1]
        if ".experts.linear_fc" in key and "shared" not in key:
            stem, number = key.rsplit(".weight", 1)
            stacks.setdefault(stem.replace(".experts.", ".experts.experts.") + ".weight", {})[int(number)] = value
        elif root == TOWER and ".decoder.layers." in key:
            stem, rest = key.split(".decoder.layers.")
            number, rest = rest.split(".", 1)
            stacks.setdefault(f"{stem}.decoder.layers.{rest}", {})[int(number)] = value
        elif last in cuts:
            spelling, parts = cuts[last]
            stem = key[: -len(last)]
            for part, rows in zip(parts, value.split(list(parts.values()))):
                keys[f"{stem}{spelling}.{part}"] = rows
        else:
            keys[key] = value
    for key, members in stacks.items():
        keys[key] = torch.stack([members[i] for i in range(len(members))])
    return keys


def module_of(key):
    return "language" if key.startswith(LANGUAGE) else "radio_encoder"


def common_state(c):
    l, a, m, e, o = (c["language_model"], c["language_model"]["attention"], c["language_model"]["mamba"], c["language_model"]["moe"], c["optimizer"])
    samples = STEPS * c["data"]["lanes"] * c["data"]["microbatches_per_lane"]
    args = argparse.Namespace(
        hybrid_layer_pattern=l["pattern"], hidden_size=l["hidden_size"], ffn_hidden_size=l["mlp"]["ffn_hidden_size"],
        num_attention_heads=a["num_attention_heads"], group_query_attention=True, num_query_groups=a["num_query_groups"],
        kv_channels=a["kv_channels"], squared_relu=True, layernorm_epsilon=l["norm_epsilon"], init_method_std=l["init_method_std"],
        vocab_size=l["vocab_size"], max_position_embeddings=l["sequence_length"], untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0, attention_dropout=0.0, mamba_num_heads=m["num_heads"], mamba_head_dim=m["head_dim"],
        mamba_num_groups=m["num_groups"], mamba_state_dim=m["state_dim"], num_experts=e["num_experts"],
        moe_router_topk=e["router_topk"], moe_ffn_hidden_size=e["ffn_hidden_size"],
        moe_shared_expert_intermediate_size=e["shared_expert_hidden_size"], moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=e["router_topk_scaling_factor"],
        consumed_train_samples=samples, consumed_valid_samples=0, global_batch_size=samples // STEPS, seed=1234,
    )
    group = {"lr": o["lr"], "betas": tuple(o["betas"]), "eps": o["eps"], "weight_decay": o["weight_decay"], "step": STEPS}
    scheduler = {
        "max_lr": o["lr"], "min_lr": o["lr"], "lr_warmup_steps": 0, "num_steps": samples, "lr_decay_style": "constant",
        "lr_decay_steps": 4000, "wd_incr_style": "constant", "start_wd": o["weight_decay"], "end_wd": o["weight_decay"], "wd_incr_steps": 4000,
    }
    return {
        "args": args, "checkpoint_version": 3.0, "iteration": STEPS, "opt_param_scheduler": scheduler,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False},
        "optimizer": {"optimizer": {"param_groups": [group]}},
    }


def save(rank, c, keys, target, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for key, value in keys.items():
        # Rows where tensor parallelism cuts them; vectors and odd sizes whole.
        axis = 1 if ".experts.experts." in key or ".decoder.layers.s" in key or ".decoder.layers.m" in key else 0
        cut = value.dim() > axis + 1 and value.shape[axis] % 2 == 0
        if cut:
            local = value.chunk(2, axis)[rank].contiguous()
            state[key] = DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)
        else:
            state[key] = DTensor.from_local(value.contiguous(), mesh, [Replicate()], run_check=False)
    dcp.save(state, checkpoint_id=target)
    dist.destroy_process_group()


def digest(value):
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def main(run, target):
    c, found = trained(run)
    keys = megatron_keys(c, {**found["param"], **found["buffer"]})
    for state in ("param", "exp_avg", "exp_avg_sq"):
        for key, value in megatron_keys(c, found[state]).items():
            keys[f"mimo.{module_of(key)}.optimizer.state.{state}.{key}"] = value
    folder = f"{target}/iter_{STEPS:07d}"
    os.makedirs(folder)
    mp.spawn(save, (c, keys, folder, "29871"), nprocs=2)
    torch.save(common_state(c), f"{folder}/common.pt")
    with open(f"{folder}/metadata.json", "w") as file:
        json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, file)
    with open(f"{target}/latest_checkpointed_iteration.txt", "w") as file:
        file.write(str(STEPS))
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    loaded = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in entries.items()}
    dcp.load(loaded, checkpoint_id=folder)
    assert all(torch.equal(loaded[k], v) for k, v in keys.items()) and loaded.keys() == keys.keys()
    with open(f"{run}/golden.json") as file:
        steps = json.load(file)["steps"][STEPS : STEPS + 2]
    listing = {
        "written_by": f"torch {torch.__version__}, torch.distributed.checkpoint, two processes",
        "run": os.path.basename(run),
        "losses": [{k: s[k] for k in ("step", "loss", "grad_norm")} for s in steps],
        "tensors": [
            {"key": k, "shape": list(v.shape), "sha256": digest(v), "chunks": len(entries[k].chunks)} for k, v in sorted(loaded.items())
        ],
        "logical": [
            {"name": k, "shape": list(v.shape), "sha256": digest(v)} for k, v in sorted({**found["param"], **found["buffer"]}.items())
        ],
    }
    with open(f"{target}/tensors.json", "w") as file:
        json.dump(listing, file, indent="\t")
        file.write("\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1].rstrip("/"), sys.argv[2].rstrip("/"))
