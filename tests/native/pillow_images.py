"""Writes tests/golden/images/pillow.json: small image files of every kind, and digests of what Pillow makes of them.

pillow_images.py OUTPUT, with Pillow 13.0.0, NumPy, and cjpeg of libjpeg-turbo on the PATH. The tests need none of them.
"""

import base64
import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import PIL
from PIL import Image

assert PIL.__version__ == "13.0.0"
warnings.filterwarnings("ignore")
chance = random.Random(13)
noise = np.random.default_rng(13)
files = []


def digest(data):
    return hashlib.sha256(data).hexdigest()[:24]


def add(name, data):
    """What Pillow makes of a file: its digest in three modes and resized, or nothing where it refuses."""
    entry = {"name": name, "file": base64.b64encode(data).decode()}
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        entry["size"] = image.size
        for mode in ("L", "RGB", "RGBA"):
            entry[mode] = digest(Image.open(io.BytesIO(data)).convert(mode).tobytes())
        width, height = chance.randint(1, 40), chance.randint(1, 40)
        if chance.random() < 0.3:
            width, height = image.width, max(1, image.height // 3)
        entry["resized"] = [width, height, digest(image.resize((width, height)).convert("RGB").tobytes())]
    except Exception:
        entry["refused"] = True
    files.append(entry)


def picture(width, height, channels):
    pixels = np.zeros((height, width, channels))
    for side, weight in ((3, 150), (9, 80), (30, 40)):
        rough = (noise.random((side, side, channels)) * 255).astype("uint8")
        for c in range(channels):
            pixels[..., c] += np.asarray(Image.fromarray(rough[..., c]).resize((width, height)), float) * weight / 255
    return np.clip(pixels, 0, 255).astype("uint8")


def image(mode, width, height):
    if mode == "1":
        return Image.fromarray(picture(width, height, 1)[..., 0]).convert("1")
    if mode == "P":
        return Image.fromarray(picture(width, height, 3)).quantize(chance.choice([2, 4, 13, 16]))
    if mode == "I;16":
        return Image.fromarray(picture(width, height, 1)[..., 0].astype("uint16") * chance.choice([1, 257]))
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = picture(width, height, channels)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode)


def save(picture, kind, **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def side():
    return chance.randint(5, 37)


def jpegs():
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        for progressive in (False, True):
            options = {"subsampling": subsampling, "progressive": progressive, "quality": chance.randint(5, 100)}
            if progressive:
                options["restart_marker_blocks"] = chance.randint(1, 5)
            add(f"JPEG {subsampling}{' progressive' * progressive}", save(image("RGB", side(), side()), "JPEG", **options))
    for progressive in (False, True):
        for mode in ("L", "CMYK"):
            add(f"JPEG {mode}{' progressive' * progressive}", save(image(mode, side(), side()), "JPEG", progressive=progressive))
    inks = bytearray(save(image("CMYK", 20, 17), "JPEG"))
    inks[inks.index(b"Adobe") + 11] = 2
    add("JPEG YCCK", bytes(inks))
    plain = save(image("RGB", 20, 17), "JPEG")
    add("JPEG without JFIF", plain[:2] + plain[20:])
    for transform in (0, 1):
        adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
        add(f"JPEG of Adobe, transform {transform}", plain[:2] + adobe + plain[20:])
    orientation = Image.Exif()
    orientation[0x112] = 6
    add("JPEG lying on its side", save(image("RGB", 20, 17), "JPEG", exif=orientation))
    add("JPEG without an end", plain[:-2])
    for cut in (3, 40):
        add(f"JPEG cut by {cut}", plain[:-cut])
    progressive = save(image("RGB", 20, 17), "JPEG", progressive=True)
    add("JPEG progressive, cut", progressive[:-2])
    for sampling in ("1x2", "4x1", "4x2", "2x2,2x1,1x2", "1x1,2x2,2x1", "3x1", "1x2,1x1,1x2", "1x3", "2x1,1x1,2x1"):
        for extra in ([], ["-progressive"], ["-arithmetic"], ["-restart", "1"]):
            if len(sampling) > 3 and extra:
                continue
            command = ["cjpeg", "-quality", str(chance.randint(20, 95)), "-sample", sampling, *extra]
            made = subprocess.run(command, input=save(image("RGB", side(), side()), "PPM"), stdout=subprocess.PIPE, check=True)
            add(" ".join(["JPEG", sampling, *extra]), made.stdout)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, depth, colours, interlaced, before=b"", palette=True):
    """Any bytes are a picture: rows of random filters and samples, in one to three parts."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colours]
    adam7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    rows = b""
    for x, y, across, down in adam7 if interlaced else [(0, 0, 1, 1)]:
        columns = len(range(x, width, across))
        for _ in range(len(range(y, height, down)) if columns else 0):
            samples = (chance.choice([chance.randrange(256), chance.randrange(4), 0]) for _ in range((columns * channels * depth + 7) // 8))
            rows += bytes([chance.randrange(5), *samples])
    packed = zlib.compress(rows, chance.choice([0, 1, 9]))
    cuts = [0, *sorted(chance.sample(range(1, len(packed)), chance.randrange(3))), len(packed)]
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, interlaced)
    parts = [chunk(b"IHDR", header)]
    if colours == 3 and palette:
        parts.append(chunk(b"PLTE", chance.randbytes(3 * chance.randint(1, 1 << depth))))
    parts.append(before)
    parts += [chunk(b"IDAT", packed[a:b]) for a, b in zip(cuts, cuts[1:])]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def pngs():
    kinds = [(d, 0) for d in (1, 2, 4, 8, 16)] + [(d, 3) for d in (1, 2, 4, 8)] + [(d, c) for c in (2, 4, 6) for d in (8, 16)]
    for depth, colours in kinds:
        for interlaced in (0, 1):
            name = f"PNG type {colours} of {depth} bits{' interlaced' * interlaced}"
            add(name, png(chance.randint(1, 19), chance.randint(1, 13), depth, colours, interlaced))
        key = {0: struct.pack(">H", chance.randrange(1 << min(depth, 8))), 2: bytes(6), 3: chance.randbytes(3)}.get(colours)
        if key is not None:
            add(f"{name}, transparent", png(9, 7, depth, colours, 1, chunk(b"tRNS", key)))
    extras = chunk(b"tEXt", b"a\0b") + chunk(b"iCCP", b"x\0\0" + zlib.compress(b"abc")) + chunk(b"gAMA", b"\0\0\1\2")
    add("PNG with texts and a profile", png(9, 7, 8, 2, 0, extras))
    add("PNG without its palette", png(5, 5, 8, 3, 0, palette=False))
    add("PNG whose text has a wrong checksum", png(5, 5, 8, 2, 0, b"\0\0\0\3tEXta\0b\1\2\3\4"))
    whole = png(9, 9, 8, 2, 0)
    add("PNG whose picture has a wrong checksum", whole[:-16] + bytes(4) + whole[-12:])
    for cut in (12, 16, 18, 20, 30, 60):
        add(f"PNG cut by {cut}", whole[:-cut])
    for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "I;16"):
        add(f"PNG {mode}", save(image(mode, side(), side()), "PNG"))


def webps():
    for mode in ("RGB", "RGBA", "L"):
        for lossless in (False, True):
            add(f"WebP {mode}{' lossless' * lossless}", save(image(mode, side(), side()), "WEBP", lossless=lossless, exact=True))
    for lossless in (False, True):
        frames = [image(mode, 20, 17) for mode in ("RGB", "RGBA", "RGB")]
        moving = save(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=lossless)
        add(f"WebP animated{' lossless' * lossless}", moving)
    add("WebP animated, cut", moving[:-50])
    still = save(image("RGB", 20, 17), "WEBP")
    for cut in (1, 9, 60):
        add(f"WebP cut by {cut}", still[:-cut])


def gifs():
    for mode in ("RGB", "L", "P", "1", "RGBA"):
        for interlaced in (0, 1):
            add(f"GIF {mode}{' interlaced' * interlaced}", save(image(mode, side(), side()), "GIF", interlace=interlaced))
    frames = [image("P", 20, 17) for _ in range(3)]
    add("GIF animated", save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100))
    for transparent in (False, True):
        data = bytearray(save(image("P", 20, 17), "GIF", **({"transparency": 1} if transparent else {})))
        at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 128 else 0)
        while data[at] == 0x21:
            at += 2
            while data[at]:
                at += data[at] + 1
            at += 1
        name = f"GIF beside its screen{' transparent' * transparent}"
        struct.pack_into("<HH", data, 6, 27, 11)
        struct.pack_into("<HH", data, at + 1, 4, 2)
        add(name, bytes(data))
        for cut in (1, 2, 3, 30):
            add(f"{name}, cut by {cut}", bytes(data[:-cut]))


def bmp(width, height, bits, compression=0, colours=b"", masks=b"", data=None, header_size=40, count=0, offset=None):
    stride = (width * bits + 31) // 32 * 4
    data = chance.randbytes(stride * abs(height)) if data is None else data
    if header_size == 12:
        header = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        header = struct.pack("<IiiHHIIiiII", header_size, width, height, 1, bits, compression, len(data), 0, 0, count, 0)
    header = (header + masks).ljust(header_size, b"\0")
    at = 14 + len(header) + len(colours) if offset is None else offset
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, at) + header + colours + data


def runs(width, height, bits):
    data = b""
    for _ in range(height):
        x = 0
        while x < width:
            if chance.random() < 0.6 or width - x < 3:
                count = chance.randint(1, width - x)
                data += bytes([count, chance.randrange(256)])
            else:
                count = chance.randint(3, width - x)
                size = (count + 1) // 2 if bits == 4 else count
                data += bytes([0, count]) + chance.randbytes(size + size % 2)
            x += count
        data += b"\0\0"
    return data + b"\0\1"


def bmps():
    for bits in (1, 4, 8):
        colours = chance.randbytes(4 << bits)
        grey = b"".join(bytes([i, i, i, 0]) for i in range(1 << bits)) if bits > 1 else b"\0\0\0\0\xff\xff\xff\0"
        add(f"BMP of {bits} bits", bmp(19, 7, bits, colours=colours))
        add(f"BMP of {bits} bits from the top", bmp(19, -7, bits, colours=colours, offset=54))
        add(f"BMP of {bits} bits, OS/2", bmp(19, 7, bits, colours=chance.randbytes(3 << bits), header_size=12))
        add(f"BMP of {bits} bits, few colours", bmp(19, 7, bits, colours=colours[:4], count=1))
        add(f"BMP of {bits} bits, grey", bmp(19, 7, bits, colours=grey))
    add("BMP of 8 bits, black and white", bmp(19, 7, 8, colours=b"\0\0\0\0\xff\xff\xff\0", count=2))
    masks = {
        16: [(0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F), (1, 2, 3)],
        24: [(0xFF0000, 0xFF00, 0xFF)],
        32: [(0xFF0000, 0xFF00, 0xFF), (0xFF000000, 0xFF0000, 0xFF00), (0xFF000000, 0xFF00, 0xFF), (0, 0, 0)]
        + [(0xFF000000, 0xFF0000, 0xFF00, 0xFF), (0xFF, 0xFF00, 0xFF0000, 0xFF000000)]
        + [(0xFF0000, 0xFF00, 0xFF, 0xFF000000), (0xFF000000, 0xFF00, 0xFF, 0xFF0000)],
    }
    for bits in (16, 24, 32):
        add(f"BMP of {bits} bits", bmp(9, 5, bits))
        for i, mask in enumerate(masks[bits]):
            packed = struct.pack("<4I", *mask, *[0] * (4 - len(mask)))
            for size in (52, 56, 124):
                add(f"BMP of {bits} bits, masks {i} in {size}", bmp(9, 5, bits, 3, masks=packed, header_size=size))
            inline = bmp(9, 5, bits, 3, colours=packed[:12])
            add(f"BMP of {bits} bits, masks {i} behind", inline)
    for compression, bits in ((1, 8), (2, 4)):
        data = runs(19, 7, bits)
        add(f"BMP of runs of {bits} bits", bmp(19, 7, bits, compression, chance.randbytes(4 << bits), data=data))
        add(f"BMP of runs of {bits} bits, cut", bmp(19, 7, bits, compression, chance.randbytes(4 << bits), data=data[:-20]))
    add("BMP cut", bmp(9, 5, 24)[:-9])
    add("BMP without its last padding", bmp(9, 5, 24)[:-1])


def resizes():
    """Digests of resized pictures whose bytes follow from their sizes (lines of `noisePixels` in the test)."""
    made = []
    for _ in range(120):
        mode = chance.choice(["L", "RGB", "RGB", "RGBA"])
        channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
        width, height, to_width, to_height = (chance.choice([chance.randint(1, 30), chance.randint(1, 200)]) for _ in range(4))
        state, pixels = (width * 1000 + height) * 7 + channels, bytearray()
        for _ in range(width * height * channels):
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            pixels.append(state >> 16 & 255)
        resized = Image.frombytes(mode, (width, height), bytes(pixels)).resize((to_width, to_height))
        made.append([channels, width, height, to_width, to_height, digest(resized.tobytes())])
    return made


jpegs()
pngs()
webps()
gifs()
bmps()
with open(sys.argv[1], "w") as output:
    lines = [json.dumps(entry) for entry in files]
    resized = [json.dumps(entry) for entry in resizes()]
    output.write('{\n"files": [\n' + ",\n".join(lines) + '\n],\n"resizes": [\n' + ",\n".join(resized) + "\n]\n}\n")
print(len(files), "files,", sum("refused" in entry for entry in files), "refused")
