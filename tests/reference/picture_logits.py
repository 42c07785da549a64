"""What transformers computes of a picture and a question, with a folder that mimo wrote or with adapters on one.

    python picture_logits.py FOLDER ADAPTERS IMAGE QUESTION OUT.safetensors      (needs torch, torchvision, transformers, peft)

ADAPTERS is a PEFT folder, or "-". Writes the token ids of the folder's processor and chat template, and the logits of every token, in
float64 from the folder's weights.
"""
import sys

import torch
from PIL import Image
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

folder, adapters, image, question, out = sys.argv[1:]
model, loading = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
print(type(model).__name__, {key: sorted(value) for key, value in loading.items() if value})
if adapters != "-":
    model = PeftModel.from_pretrained(model, adapters)
content = [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": f"\n{question}"}]
asked = AutoProcessor.from_pretrained(folder).apply_chat_template(
    [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)
with torch.no_grad():
    logits = model.eval().double()(**asked).logits[0]
save_file({"ids": asked["input_ids"][0].int(), "logits": logits.float().contiguous()}, out)
