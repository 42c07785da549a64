"""tests/golden/processors.json: pictures of odd sizes through transformers' image processors of vision-language models.

    python tests/golden/tools/make_processors.py tests/golden/processors.json

A picture's bytes are an integer hash of their index and its number. Of what a processor makes of it: the grid or the number of tiles, and the
SHA-256 of the values, little-endian float32.
"""
import hashlib, json, sys
import numpy as np
import torch
from transformers import Glm4vImageProcessor, GotOcr2ImageProcessor, LlavaOnevisionImageProcessor, Qwen2VLImageProcessor, SiglipImageProcessor

sizes = [(24, 24), (30, 30), (41, 22), (22, 41), (1, 1), (1, 9), (9, 1), (7, 130), (130, 7), (63, 65), (64, 64), (65, 63), (100, 37), (37, 100),
         (255, 31), (31, 255), (97, 89), (12, 12), (48, 48), (49, 47), (200, 199), (3, 5), (5, 3), (17, 300), (300, 17), (128, 256), (256, 128),
         (11, 23), (72, 24), (24, 72), (150, 150), (151, 149), (80, 33), (33, 80), (16, 160), (90, 91)]

def picture(number, height, width):
    n = np.arange(height * width * 3, dtype=np.uint64)
    h = (n * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return ((h ^ (h >> 16)) >> 24).astype(np.uint8).reshape(height, width, 3)

def digest(values):
    return hashlib.sha256(np.ascontiguousarray(values.numpy(), dtype="<f4").tobytes()).hexdigest()[:16]

siglip = SiglipImageProcessor(size={"height": 28, "width": 28})
tiles = GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=6, crop_to_patches=True,
                              image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
blocks = Qwen2VLImageProcessor(patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 6144},
                               image_mean=[0.5] * 3, image_std=[0.5] * 3)
glm = Glm4vImageProcessor(patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 640, "longest_edge": 12288})
pinpoints = [[28 * rows, 28 * columns] for rows in range(1, 5) for columns in range(1, 5)]
# Of images in a sample alone, and of two in a sample.
any_resolution = LlavaOnevisionImageProcessor(size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints)
cases = []
for number, (height, width) in enumerate(sizes):
    image = torch.from_numpy(picture(number, height, width)).permute(2, 0, 1)
    case = {"height": height, "width": width, "siglip": digest(siglip(image, return_tensors="pt")["pixel_values"])}
    cut = tiles(image, return_tensors="pt")
    case["tiles"] = [int(cut["num_patches"][0]), digest(cut["pixel_values"])]
    alone = any_resolution([[image]], return_tensors="pt")["pixel_values"]
    case["anyres"] = [alone.shape[1], digest(alone), digest(any_resolution([[image, image]], return_tensors="pt")["pixel_values"][0])]
    if max(height, width) <= 200 * min(height, width):
        for key, processor in (("blocks", blocks), ("frames", glm)):
            patches = processor(image, return_tensors="pt")
            case[key] = [*patches["image_grid_thw"][0].tolist()[1:], digest(patches["pixel_values"])]
    cases.append(case)
import transformers
json.dump({"source": f"transformers {transformers.__version__}, torch {torch.__version__}", "cases": cases}, open(sys.argv[1], "w"), indent=1)
