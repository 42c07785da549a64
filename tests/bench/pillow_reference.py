"""Decoding and resizing by Pillow, on one core.

pillow_reference.py make FOLDER         writes photo-like pictures of every kind
pillow_reference.py time FOLDER KIND SIDE ROUNDS
    prints as JSON the least processor seconds of a picture: decoded, decoded and resized to SIDE x SIDE, only resized
"""

import json
import os
import random
import sys
import time
from io import BytesIO

from PIL import Image, ImageChops

KINDS = {"jpg": {"quality": 88}, "png": {}, "webp": {"quality": 85}}


def photo(seed):
    """Large patches, smaller ones, and the noise of a camera."""
    chance = random.Random(seed)
    width, height = 800 + 20 * seed, 600 + 13 * seed
    picture = Image.new("RGB", (width, height), (70, 70, 70))
    for side, weight in ((4, 0.5), (16, 0.3), (64, 0.15)):
        rough = Image.frombytes("RGB", (side, side), chance.randbytes(3 * side * side)).resize((width, height))
        picture = ImageChops.add(picture, rough.point(lambda value, weight=weight: value * weight))
    noise = Image.frombytes("RGB", (width, height), chance.randbytes(3 * width * height)).point(lambda value: value // 32)
    return ImageChops.subtract(picture, noise)


def make(folder):
    for seed in range(8):
        for kind, options in KINDS.items():
            photo(seed).save(os.path.join(folder, f"{seed}.{kind}"), **options)


def least(rounds, run, items):
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        for item in items:
            run(item)
        seconds.append((time.process_time() - started) / len(items))
    return min(seconds)


def measure(folder, kind, side, rounds):
    files = []
    for seed in range(8):
        with open(os.path.join(folder, f"{seed}.{kind}"), "rb") as file:
            files.append(file.read())
    pictures = [Image.open(BytesIO(data)).convert("RGB") for data in files]
    size = (side, side)
    print(
        json.dumps(
            [
                least(rounds, lambda data: Image.open(BytesIO(data)).convert("RGB"), files),
                least(rounds, lambda data: Image.open(BytesIO(data)).resize(size).convert("RGB"), files),
                least(rounds, lambda picture: picture.resize(size), pictures),
            ]
        )
    )


if sys.argv[1] == "make":
    make(sys.argv[2])
else:
    measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
