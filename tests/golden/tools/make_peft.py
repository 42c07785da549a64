"""Makes the reference folder lora-peft: adapters of the peft package on the model of a hybrid-* reference.

    python make_peft.py BASE FOLDER      (needs torch, transformers, peft and safetensors)

own/: adapters as peft's LoraModel has them, an A of each of q_proj, k_proj and v_proj; every matrix is drawn.
first/, last/: adapters without those of q, k and v before and after three steps of torch's AdamW, the base frozen.
expected.safetensors: `ids` and the base's `logits` with own/; `batches` [steps, 2, tokens + 1] of the training.
expected.json: the training's losses (means of a token) and its optimizer.
"""
import json
import shutil
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

RANK, ALPHA, STEPS, TOKENS = 2, 6, 3, 24
OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


def adapted(base, modules, seed):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def save(model, folder):
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def main(base, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {"ids": torch.randint(512, (1, 12), generator=generator)}

    own = adapted(base, ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "up_proj", "down_proj"], 2)
    save(own, folder / "own")
    with torch.no_grad():
        tensors["logits"] = own(tensors["ids"]).logits[0].contiguous()

    model = adapted(base, ["o_proj", "in_proj", "up_proj", "down_proj"], 3)
    save(model, folder / "first")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIMIZER)
    batches = torch.randint(512, (STEPS, 2, TOKENS + 1), generator=generator)
    losses = []
    for ids in batches:
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    save(model, folder / "last")

    tensors = {name: t.to(torch.int32) if t.dtype == torch.int64 else t for name, t in tensors.items()}
    save_file({**tensors, "batches": batches.to(torch.int32)}, folder / "expected.safetensors")
    text = json.dumps({"losses": losses, "optimizer": OPTIMIZER}, indent="\t")
    (folder / "expected.json").write_text(text + "\n")


main(sys.argv[1], Path(sys.argv[2]))
