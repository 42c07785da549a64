"""Makes a folder in the form of tests/golden/hybrid-text with a larger NemotronH of random weights and random tokens.

pytorch_model.py BASE TARGET SIZES: BASE gives the configuration and the optimizer, SIZES, in JSON, replaces values of the
configuration and says "batch" and "seq".
"""

import json
import struct
import sys
from pathlib import Path

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

from pytorch_values import plain


def write_safetensors(path, tensors):
    kinds = {torch.float32: "F32", torch.int32: "I32"}
    header, blobs, offset = {}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.contiguous().numpy().tobytes()
        shape = list(tensor.shape)
        header[name] = {"dtype": kinds[tensor.dtype], "shape": shape, "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def main():
    base, target, sizes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    batch, seq = sizes.pop("batch"), sizes.pop("seq")
    config = {**json.loads((base / "config.json").read_text()), **sizes}
    golden = json.loads((base / "golden.json").read_text())
    torch.manual_seed(1)
    arguments = {k: plain(v) for k, v in config.items() if k not in ("model_type", "transformers_version")}
    model = NemotronHForCausalLM(NemotronHConfig(**arguments))
    golden["optimizer"]["no_weight_decay"] = [name for name, weight in model.named_parameters() if weight.ndim <= 1]
    golden.update(batch=batch, seq=seq)
    (target / "config.json").write_text(json.dumps(config))
    (target / "golden.json").write_text(json.dumps(golden))
    write_safetensors(target / "model.safetensors", {name: w.float() for name, w in model.state_dict().items()})
    tokens = torch.randint(0, config["vocab_size"], (1, batch, seq + 1), dtype=torch.int32)
    write_safetensors(target / "batches.safetensors", {"tokens": tokens})


main()
