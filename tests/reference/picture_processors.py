"""Odd pictures through transformers' image processors of vision-language models.

    python picture_processors.py SEED OUT.json      (needs Pillow 13, numpy, torch, torchvision, transformers)

The files are those of ../native/transformers_images.py, small and of every kind (but for EXIF that ends within a checksum), and some eighty of other sizes, from one pixel to very wide
and very high. Each is decoded as datasets does, upright, and handed to a processor in the mode that it has. Of what a processor makes of it:
the grid or the number of tiles, and the SHA-256 of the values, little-endian float32; of the processor of Nemotron models, which does not
round, the values.
"""
import base64
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile

from PIL import Image, ImageOps
from transformers import (
    Glm4vImageProcessor,
    GotOcr2ImageProcessor,
    LlavaOnevisionImageProcessor,
    NemotronH_Omni_Reasoning_V3ImageProcessor,
    Qwen2VLImageProcessor,
    SiglipImageProcessor,
)

seed, out = int(sys.argv[1]), sys.argv[2]
chance = random.Random(seed)

siglip = SiglipImageProcessor(size={"height": 28, "width": 28})
tiles = GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=6, crop_to_patches=True,
                              image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
blocks = Qwen2VLImageProcessor(patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 6144},
                               image_mean=[0.5] * 3, image_std=[0.5] * 3)
glm = Glm4vImageProcessor(patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 640, "longest_edge": 12288})
pinpoints = [[28 * rows, 28 * columns] for rows in range(1, 5) for columns in range(1, 5)]
any_resolution = LlavaOnevisionImageProcessor(size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints)
omni = NemotronH_Omni_Reasoning_V3ImageProcessor(patch_size=4, min_num_patches=4)
# Rows of the text that an image may have.
ROOM = 64


def digest(values):
    return hashlib.sha256(values.contiguous().numpy().astype("<f4").tobytes()).hexdigest()[:16]


def upright(data):
    """None: Pillow raises for its EXIF."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception:
        return None


def processed(name, data):
    image = upright(data)
    width, height = image.size
    made = lambda processor, images, **named: processor(images, return_tensors="pt", **named)
    case = {"name": f"{name}, {image.mode} {width} x {height}", "file": base64.b64encode(data).decode(), "width": width, "height": height}
    case["siglip"] = digest(made(siglip, image)["pixel_values"])
    cut = made(tiles, image)
    case["tiles"] = [int(cut["num_patches"][0]), digest(cut["pixel_values"])]
    alone = made(any_resolution, [[image]])["pixel_values"]
    case["anyres"] = [alone.shape[1], digest(alone), digest(made(any_resolution, [[image, image]])["pixel_values"][0])]
    if max(height, width) <= 200 * min(height, width):
        for key, processor in (("blocks", blocks), ("frames", glm)):
            patches = made(processor, image)
            case[key] = [*patches["image_grid_thw"][0].tolist()[1:], digest(patches["pixel_values"])]
    try:
        whole = made(omni, image, max_model_len=ROOM + 4)
        values = whole["pixel_values"].float().flatten().numpy().astype("<f4").tobytes()
        case["omni"] = [*whole["image_grid_hw"][0].tolist(), base64.b64encode(values).decode()]
    except ZeroDivisionError:
        pass  # Of a picture so narrow that a side has no patch it divides by zero.
    return case


def noise(mode, width, height):
    channels = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    if mode == "1":
        return noise("L", width, height).convert("1")
    return Image.frombytes(mode, (width, height), chance.randbytes(width * height * channels))


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def others():
    edges = [(1, 1), (1, 2), (2, 1), (1, 40), (40, 1), (1, 200), (200, 1), (1, 300), (300, 1), (3, 900), (900, 3), (2, 400), (400, 2)]
    sizes = edges + [(chance.randint(1, 400), chance.randint(1, 400)) for _ in range(40)]
    kinds = [("RGB", "PNG", {}), ("RGBA", "PNG", {}), ("L", "PNG", {}), ("LA", "PNG", {}), ("1", "PNG", {}), ("RGB", "JPEG", {}),
             ("RGB", "JPEG", {"progressive": True, "quality": 40}), ("CMYK", "JPEG", {}), ("L", "JPEG", {}), ("RGB", "WEBP", {}),
             ("RGBA", "WEBP", {"lossless": True}), ("RGB", "BMP", {})]
    for number, (width, height) in enumerate(sizes):
        mode, kind, options = kinds[number % len(kinds)]
        yield f"{kind} {options}", saved(noise(mode, width, height), kind, **options)
    for number in range(12):
        size = chance.randint(2, 300), chance.randint(2, 300)
        few = noise("RGB", *size).quantize(2 + 7 * number)
        yield "palette", saved(few, "PNG", **({"transparency": number % 2} if number % 3 else {}))
        yield "GIF", saved(few, "GIF", **({"transparency": 1} if number % 2 else {}))
    for number in range(6):
        size = chance.randint(2, 200), chance.randint(2, 200)
        yield "16 bits", saved(Image.frombytes("I;16", size, chance.randbytes(2 * size[0] * size[1])), "PNG")


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "images.json")
    here = os.path.dirname(os.path.abspath(__file__))
    subprocess.run([sys.executable, os.path.join(here, "../native/transformers_images.py"), path, str(seed)], check=True)
    with open(path) as file:
        small = [(entry["name"], base64.b64decode(entry["file"])) for entry in json.load(file)["files"]]
with open(out, "w") as file:
    json.dump([processed(*one) for one in [*small, *others()] if upright(one[1]) is not None and "behind the picture, cut" not in one[0]], file)
