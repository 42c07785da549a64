"""What transformers computes of pictures and a question, with a folder that mimo wrote or with adapters on one.

    python picture_logits.py FOLDER ADAPTERS QUESTION OUT.safetensors IMAGE…      (needs torch, torchvision, transformers, peft)

ADAPTERS is a PEFT folder, or "-"; an IMAGE is one path, or several with commas between. Of the k-th it writes `ids.k`, the token ids of the
folder's processor and chat template, and `logits.k`, the logits of every token, in float64 from the folder's weights.
"""
import sys

import torch
from PIL import Image
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

folder, adapters, question, out, *images = sys.argv[1:]
model, loading = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True)
print(type(model).__name__, {key: sorted(value) for key, value in loading.items() if value})
if adapters != "-":
    model = PeftModel.from_pretrained(model, adapters)
model, processor, tensors = model.eval().double(), AutoProcessor.from_pretrained(folder), {}
for k, paths in enumerate(images):
    content = [part for path in paths.split(",") for part in ({"type": "image", "image": Image.open(path)}, {"type": "text", "text": "\n"})]
    asked = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": question}]}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )
    with torch.no_grad():
        logits = model(**asked).logits[0]
    tensors |= {f"ids.{k}": asked["input_ids"][0].int(), f"logits.{k}": logits.float().contiguous()}
save_file(tensors, out)
