"""Folders whose weights are quantised, as transformers reads them.

    python quantised.py FOLDER NAME=BASE...      (needs torch, transformers >= 5.23 and accelerate)

Of each folder BASE writes FOLDER/NAME with matrices in FP8, blocks of 16 x 8 (a scale of fp32, or bf16 where the name has one), or
those of gpt-oss's experts in MXFP4, and FOLDER/NAME-plain: what transformers makes of it in bf16, under the published names.
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

BLOCK = (16, 8)

def fp8(weight, scale_type):
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
    scale = (blocks.abs().amax((1, 3)) / 448).to(scale_type)
    codes = (blocks / scale.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scale

def quantised(name, tensors):
    out = {}
    for key, value in tensors.items():
        stack = key.endswith(("gate_up_proj", "down_proj")) and value.ndim == 3
        if stack and name.startswith("gpt-oss"):
            experts, inputs, outputs = value.shape
            shape = (experts, outputs, inputs // 32)
            out[key + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            out[key + "_scales"] = torch.randint(118, 126, shape, dtype=torch.uint8)
        elif not name.startswith("gpt-oss") and key.endswith("_proj.weight") and not any(
            size % block for size, block in zip(value.shape, BLOCK)
        ):
            out[key], out[key + "_scale_inv"] = fp8(value, torch.bfloat16 if "bf16" in name else torch.float32)
        else:
            out[key] = value if "correction_bias" in key else value.to(torch.bfloat16)
    return {key: value.contiguous() for key, value in out.items()}

torch.manual_seed(1)
folder, *models = sys.argv[1:]
for name, base in (model.split("=") for model in models):
    path, base = pathlib.Path(folder, name), pathlib.Path(base)
    path.mkdir()
    config = json.loads((base / "config.json").read_text()) | {"dtype": "bfloat16"}
    tensors = load_file(base / "model.safetensors")
    if name.startswith("gpt-oss"):
        # Widths of which 32 is a factor.
        config["intermediate_size"] = 64
        for key, value in tensors.items():
            for axis in {"gate_up_proj": [2], "gate_up_proj_bias": [1], "down_proj": [1]}.get(key.split(".")[-1], []):
                shape = list(value.shape)
                shape[axis] = shape[axis] // 48 * 64
                value = torch.randn(shape) * 0.05
            tensors[key] = value
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    else:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(quantised(name, tensors), path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    # As of a model that was never quantised: transformers cannot write the one that it has read with its experts apart.
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.save_pretrained(f"{folder}/{name}-plain")
