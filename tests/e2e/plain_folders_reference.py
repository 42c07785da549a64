"""What transformers makes of pictures and conversations with a vision-language folder that `mimo train --save-hf` wrote.

    python plain_folders_reference.py SAMPLES.json MODEL...      (needs torch, torchvision and transformers >= 5.23)

SAMPLES.json lists {"image": PATH, "turns": [{"role", "content"}, …]} with one <image> in a content and an assistant's turn at
the end. By each folder's own processor, chat template and weights: prints a line with the grids of patches, the number of tokens
of the assistants' turns and their mean loss, and writes the patches of picture i as tensor i of MODEL/patches.safetensors.
"""
import json
import sys

import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer


@torch.no_grad()
def look(folder, samples):
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    grids, patches, loss, count = [], {}, 0.0, 0
    for index, sample in enumerate(samples):
        picture = processor([Image.open(sample["image"])], return_tensors="pt")
        grid = picture["image_grid_hw"][0].tolist()
        rows = "<img>" + "<image>" * (grid[0] * grid[1] // 4) + "</img>"
        turns = [{**turn, "content": turn["content"].replace("<image>", rows)} for turn in sample["turns"]]
        prompt = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True)["input_ids"]
        ids = tokenizer.apply_chat_template(turns)["input_ids"]
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        logits = model(torch.tensor([ids]), **picture).logits[0]
        answer = torch.arange(len(prompt), end)
        loss += torch.nn.functional.cross_entropy(logits[answer - 1].double(), torch.tensor(ids)[answer], reduction="sum").item()
        count += len(answer)
        grids.append(grid)
        patches[str(index)] = picture["pixel_values"].float().contiguous()
    save_file(patches, f"{folder}/patches.safetensors")
    print(json.dumps({"grids": grids, "tokens": count, "loss": loss / count}))


with open(sys.argv[1]) as file:
    listed = json.load(file)
for model in sys.argv[2:]:
    look(model, listed)
