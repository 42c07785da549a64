"""Makes the tiny Qwen3-VL of docs/fine-tune-pictures.md from random weights, in the folder of make_data.py:

    pip install torch==2.15.0 transformers==5.23.0 datasets==5.2.0 pyarrow==26.0.1 pillow==13.0.0
    cp -r qwen3-vl start && python make_qwen3_vl.py start rows
    mimo data import rows/rows.jsonl --output rows/set --split-ratio 95,5,0
    mimo train --config qwen3-vl.yaml --load-hf start --data-path rows/set --global-batch-size 4 --train-iters 300 --save-hf trained
    python make_qwen3_vl.py trained

The first call writes random weights and `config.json` into the folder `start`, which has tokenizer, template and image processor already,
and 2,400 pictures with descriptions such as "cross, yellow" into `rows`. The second one rounds the trained weights to bf16.
"""
import json
import os
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

folder, rows = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None

if rows is None:
    path = os.path.join(folder, "model.safetensors")
    rounded = {name: value.bfloat16().contiguous() for name, value in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        text = file.read().replace('"dtype": "float32"', '"dtype": "bfloat16"')
    with open(path, "w") as file:
        file.write(text)
    sys.exit()

from make_data import picture  # noqa: E402 (writes the data of fine-tune.md again, the same bytes)

torch.manual_seed(7)
rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[3, 3, 2], mrope_interleaved=True)
config = Qwen3VLConfig(
    text_config=dict(
        vocab_size=272, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, rope_parameters=rope,
        initializer_range=0.1, eos_token_id=3, bos_token_id=None, pad_token_id=None,
    ),
    vision_config=dict(
        depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=8, spatial_merge_size=2,
        temporal_patch_size=2, num_position_embeddings=64, out_hidden_size=64, deepstack_visual_indexes=[0],
        initializer_range=0.1,
    ),
    image_token_id=6, video_token_id=7, vision_start_token_id=4, vision_end_token_id=5, tie_word_embeddings=True,
)
Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)

os.makedirs(rows, exist_ok=True)
with open(os.path.join(rows, "rows.jsonl"), "w") as records:
    for number in range(10000, 12400):
        png, answer = picture(number)
        with open(os.path.join(rows, f"{number}.png"), "wb") as file:
            file.write(png)
        _, colour, shape = answer.split()
        record = {"image": f"{number}.png", "question": "Describe the picture.", "answer": f"{shape}, {colour}"}
        records.write(json.dumps(record) + "\n")
