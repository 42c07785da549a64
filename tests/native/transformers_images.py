"""Writes image files of odd kinds, and the pixels that datasets and transformers make of them.

transformers_images.py OUTPUT SEED, with Pillow 13. tests/golden/images/transformers.json is that of seed 1; where there is a
reference Python, tests/native/transformers-images.test.ts runs the program with another seed. With PyTorch, torchvision and
transformers, the output also has patches of transformers' image processor of Nemotron models.
"""

import base64
import hashlib
import importlib.util
import io
import json
import random
import struct
import sys
import warnings
import zlib

from PIL import Image, ImageOps

warnings.filterwarnings("ignore")
output, seed = sys.argv[1], int(sys.argv[2])
chance = random.Random(seed)
files = []
ORIENTATION = 0x112


def shown(data):
    """As datasets' Image feature decodes, and transformers' convert_to_rgb makes RGB."""
    image = Image.open(io.BytesIO(data))
    image.load()
    if image.getexif().get(ORIENTATION) is not None:
        image = ImageOps.exif_transpose(image)
    return converted(image)


def converted(image):
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def add(name, data, unreadable=False, like=None):
    """`unreadable`: EXIF for which Pillow raises, and mimo shows the picture as it is stored. `like`: a file that is shown so."""
    entry = {"name": name, "file": base64.b64encode(data).decode()}
    stored = Image.open(io.BytesIO(like or data))
    entry["stored"] = stored.size
    image = converted(stored) if unreadable else shown(like or data)
    entry["size"] = image.size
    entry["rgb"] = hashlib.sha256(image.tobytes()).hexdigest()[:24]
    to = chance.randint(1, 40), chance.randint(1, 40)
    entry["resized"] = [*to, hashlib.sha256(image.resize(to).tobytes()).hexdigest()[:24]]
    files.append(entry)


def picture(mode, width=None, height=None):
    width, height = width or chance.randint(3, 23), height or chance.randint(3, 23)
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    small = Image.frombytes(mode, (3, 2), chance.randbytes(6 * channels))
    return small.resize((width, height))


def save(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def ifd(entries, order="<", head=None, offset=8):
    """EXIF whose first directory has entries of tag, type, count and four bytes."""
    mark = head or {"<": b"II*\0", ">": b"MM\0*"}[order]
    body = struct.pack(order + "H", len(entries))
    for tag, kind, count, value in entries:
        body += struct.pack(order + "HHL", tag, kind, count) + value
    return mark + struct.pack(order + "L", offset) + bytes(offset - 8) + body + bytes(4)


def orientation(value, order="<"):
    return ifd([(0x10F, 2, 4, b"abc\0"), (ORIENTATION, 3, 1, struct.pack(order + "HH", value, 0))], order)


XMP = '<x:xmpmeta><rdf:Description %s/></x:xmpmeta>'
attribute = XMP % 'tiff:Orientation="6"'
element = XMP % "><tiff:Orientation>8</tiff:Orientation"


def jpeg_with(*segments, image=None):
    plain = save(image or picture("RGB"), "JPEG")
    return plain[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s for s in segments) + plain[2:]


def jpegs():
    exif = b"Exif\0\0"
    for value in range(10):
        for order in "<>":
            add(f"JPEG orientation {value} {order}", jpeg_with(exif + orientation(value, order)))
    for mode, options in (("L", {}), ("CMYK", {}), ("RGB", {"progressive": True}), ("CMYK", {"progressive": True})):
        turned = chance.randint(2, 8)
        add(f"JPEG {mode} {options} {turned}", save(picture(mode), "JPEG", exif=exif + orientation(turned), **options))
    kinds = {
        "long": (4, 1, struct.pack("<L", 6)),
        "signed": (8, 1, struct.pack("<hH", 5, 7)),
        "signed long": (9, 1, struct.pack("<l", 7)),
        "negative": (8, 1, struct.pack("<hH", -6, 0)),
        "byte": (1, 1, b"\6\0\0\0"),
        "signed byte": (6, 1, b"\6\0\0\0"),
        "text": (2, 2, b"6\0\0\0"),
        "undefined": (7, 1, b"\6\0\0\0"),
        "pair": (3, 2, struct.pack("<HH", 8, 3)),
        "single": (11, 1, struct.pack("<f", 6.0)),
        "single fraction": (11, 1, struct.pack("<f", 6.5)),
        "directory": (13, 1, struct.pack("<L", 3)),
        "unknown type": (99, 1, b"\6\0\0\0"),
        "none": (3, 0, b"\6\0\0\0"),
    }
    for name, entry in kinds.items():
        add(f"JPEG orientation as {name}", jpeg_with(exif + ifd([(ORIENTATION, *entry)])))
        add(f"JPEG orientation as {name}, and XMP", jpeg_with(exif + ifd([(ORIENTATION, *entry)]), xmp(attribute)))
    for name, kind, value in (
        ("fraction", 5, struct.pack("<LL", 12, 2)),
        ("signed fraction", 10, struct.pack("<ll", -16, -2)),
        ("real", 12, struct.pack("<d", 3.0)),
        ("eight bytes", 16, struct.pack("<Q", 4)),
    ):
        behind = struct.pack("<L", 26)
        add(f"JPEG orientation as {name}", jpeg_with(exif + ifd([(ORIENTATION, kind, 1, behind)]) + value))
        add(f"JPEG orientation as {name}, cut off", jpeg_with(exif + ifd([(ORIENTATION, kind, 1, behind)]) + value[:5]))
    twice = [(ORIENTATION, 3, 1, b"\6\0\0\0"), (ORIENTATION, 3, 1, b"\3\0\0\0")]
    add("JPEG orientation twice", jpeg_with(exif + ifd(twice)))
    add("JPEG orientation behind others", jpeg_with(exif + ifd([(i, 3, 1, bytes(4)) for i in range(200)] + twice[:1])))
    add("JPEG directory far behind", jpeg_with(exif + ifd(twice, offset=3000)))
    whole = exif + orientation(6)
    for cut in (1, 4, 5, 12, 16, 17, 28):
        add(f"JPEG EXIF cut by {cut}", jpeg_with(whole[:-cut]))
    add("JPEG more entries than bytes", jpeg_with(whole[:14] + b"\xff\xff" + whole[16:]))
    add("JPEG directory behind the end", jpeg_with(exif + b"II*\0\xff\xff\xff\x7f" + whole[14:]))
    loop = ifd(twice[:1])[:-4] + struct.pack("<L", 8)
    add("JPEG directory that follows itself", jpeg_with(exif + loop))
    children = [(0x8769, 4, 1, struct.pack("<L", 8)), (0x8825, 4, 1, struct.pack("<L", 8)), twice[0]]
    add("JPEG directory that holds itself", jpeg_with(exif + ifd(children)))
    add("JPEG EXIF in two segments", jpeg_with(whole[:20], exif + whole[20:]))
    add("JPEG EXIF marked twice", jpeg_with(exif + whole))
    for head in (b"II\0*", b"MM*\0"):
        order = "<" if head[0] == 73 else ">"
        entries = [(ORIENTATION, 3, 1, struct.pack(order + "HH", 6, 0))]
        add(f"JPEG EXIF header {head}", jpeg_with(exif + ifd(entries, order, head)))
    add("JPEG EXIF of another header", jpeg_with(exif + b"IIII" + orientation(6)[4:]), unreadable=True)
    add("JPEG empty EXIF, and XMP", jpeg_with(exif, xmp(attribute)))
    add("JPEG XMP attribute", jpeg_with(xmp(attribute)))
    add("JPEG XMP element", jpeg_with(xmp(element)))
    add("JPEG XMP twice", jpeg_with(xmp(attribute), xmp(element)))
    add("JPEG XMP with another first", jpeg_with(xmp("tiff:Orientation='3' tiff:Orientation=\"9\" " + element)))
    add("JPEG EXIF without orientation, and XMP", jpeg_with(exif + ifd([(0x10F, 2, 4, b"abc\0")]), xmp(element)))
    add("JPEG EXIF upright, XMP turned", jpeg_with(exif + orientation(1), xmp(attribute)))
    first = b"\xff\xe1\0\5abc"
    add("JPEG bytes between segments", jpeg_with(whole)[:2] + first + b"\0\1\xff" + jpeg_with(whole)[2:])
    plain = save(picture("RGB"), "JPEG")
    behind = b"\xff\xe1" + struct.pack(">H", len(whole) + 2) + whole
    add("JPEG EXIF behind the picture", plain[:-2] + behind + plain[-2:])
    add("JPEG of two pictures", save(picture("RGB", 9, 5), "MPO", exif=whole, save_all=True, append_images=[picture("RGB", 9, 5)]))


def xmp(text):
    return b"http://ns.adobe.com/xap/1.0/\0" + text.encode()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, depth, colours, *before, behind=b"", rows=None):
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colours]
    size = (width * channels * depth + 7) // 8
    rows = rows or b"".join(b"\0" + chance.randbytes(size) for _ in range(height))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + chunk(b"IDAT", zlib.compress(rows)) + behind + chunk(b"IEND", b"")


def pngs():
    for value in range(1, 9):
        add(f"PNG eXIf {value}", png(5, 3, 8, 2, chunk(b"eXIf", orientation(value, "<>"[value % 2]))))
    for mode in ("L", "LA", "RGB", "RGBA"):
        add(f"PNG {mode}", save(picture(mode), "PNG"))
        add(f"PNG {mode} turned", save(picture(mode), "PNG", exif=b"Exif\0\0" + orientation(chance.randint(2, 8))))
    ramp = b"\0" + b"".join(bytes([v, 255 - v, v // 2, alpha]) for alpha in range(0, 256, 5) for v in range(0, 256, 3))
    add("PNG of every alpha", png((len(ramp) - 1) // 4, 1, 8, 6, rows=ramp))
    # The first row's greys are differences to the left, the other rows differences of one in alpha to the row above.
    every = b"\1\0\0" + b"\1\0" * 255 + (b"\2" + b"\0\1" * 256) * 255
    add("PNG of every grey and alpha", png(256, 256, 8, 4, rows=every))
    exif = orientation(6)
    raw = ("\nexif\n%8d\n" % (len(exif) + 6) + (b"Exif\0\0" + exif).hex() + "\n").encode()
    lines = raw[:40] + b"\n" + raw[40:]
    key = b"Raw profile type exif\0"
    xmp_key = b"XML:com.adobe.xmp\0"
    long_ago = [chunk(b"acTL", struct.pack(">II", 2, 0)), chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 5, 3, 0, 0, 1, 1, 0, 0))]
    next_one = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 1, 5, 3, 0, 0, 1, 1, 0, 0))
    next_one += chunk(b"fdAT", struct.pack(">I", 2) + zlib.compress(bytes(3 * 16)))
    for name, before, behind in (
        ("eXIf behind the picture", [], chunk(b"eXIf", exif)),
        ("eXIf twice", [chunk(b"eXIf", exif), chunk(b"eXIf", orientation(3))], b""),
        ("eXIf twice, around the picture", [chunk(b"eXIf", exif)], chunk(b"eXIf", orientation(3))),
        ("eXIf with a mark", [chunk(b"eXIf", b"Exif\0\0" + exif)], b""),
        ("eXIf empty, and XMP", [chunk(b"eXIf", b""), chunk(b"iTXt", xmp_key + b"\0\0\0\0" + element.encode())], b""),
        ("text named exif", [chunk(b"tEXt", b"exif\0Exif\0\0" + exif)], b""),
        ("raw profile", [chunk(b"tEXt", key + raw)], b""),
        ("raw profile in lines", [chunk(b"tEXt", key + lines)], b""),
        ("raw profile, packed", [chunk(b"zTXt", key + b"\0" + zlib.compress(raw))], b""),
        ("raw profile, international", [chunk(b"iTXt", key + b"\0\0en\0key\0" + raw)], b""),
        ("raw profile behind the picture", [], chunk(b"zTXt", key + b"\0" + zlib.compress(raw))),
        ("raw profile and eXIf", [chunk(b"tEXt", key + raw), chunk(b"eXIf", orientation(3))], b""),
        ("XMP", [chunk(b"iTXt", xmp_key + b"\0\0\0\0" + attribute.encode())], b""),
        ("XMP, packed", [chunk(b"iTXt", xmp_key + b"\1\0\0\0" + zlib.compress(element.encode()))], b""),
        ("XMP as text", [chunk(b"tEXt", xmp_key + element.encode())], b""),
        ("XMP behind the picture", [], chunk(b"iTXt", xmp_key + b"\0\0\0\0" + attribute.encode())),
        ("XMP beside eXIf", [chunk(b"eXIf", orientation(1)), chunk(b"iTXt", xmp_key + b"\0\0\0\0" + attribute.encode())], b""),
        ("animated, eXIf before", [chunk(b"eXIf", exif), *long_ago], next_one),
        ("animated, eXIf between", long_ago, chunk(b"eXIf", exif) + next_one),
        ("animated, eXIf behind", long_ago, next_one + chunk(b"eXIf", exif)),
    ):
        add(f"PNG {name}", png(5, 3, 8, 2, *before, behind=behind))
    for name, data in (("raw profile without lines", b"exif " + raw[-40:]), ("raw profile of other letters", raw[:60] + b"zz" + raw[60:])):
        add(f"PNG {name}", png(5, 3, 8, 2, chunk(b"tEXt", key + data)), unreadable=True)
    add("PNG eXIf of another header", png(5, 3, 8, 2, chunk(b"eXIf", b"XX" + exif[2:])), unreadable=True)
    add("PNG eXIf of four bytes", png(5, 3, 8, 2, chunk(b"eXIf", exif[:4])), unreadable=True)
    plain = png(5, 3, 8, 2)
    whole = plain[:-12] + chunk(b"eXIf", exif)
    for cut in (1, 4, 8, 30):
        add(f"PNG eXIf behind the picture, cut by {cut}", whole[:-cut], like=plain)
    for depth in (1, 2, 4, 8):
        colours = chunk(b"PLTE", chance.randbytes(3 << depth))
        add(f"PNG palette of {depth} bits", png(13, 7, depth, 3, colours))
        add(f"PNG palette of {depth} bits, alphas", png(13, 7, depth, 3, colours, chunk(b"tRNS", chance.randbytes(1 << depth))))
        add(f"PNG palette of {depth} bits, one transparent", png(13, 7, depth, 3, colours, chunk(b"tRNS", b"\xff\0")))
        add(f"PNG palette of {depth} bits, opaque", png(13, 7, depth, 3, colours, chunk(b"tRNS", b"\xff\xff")))
        few = struct.pack(">H", chance.randrange(1 << depth))
        add(f"PNG grey of {depth} bits, one transparent", png(33, 17, depth, 0, chunk(b"tRNS", few)))
    squares = b"".join(b"\0" + bytes(chance.choice((0, 9, 255)) for _ in range(33)) for _ in range(20))
    add("PNG RGB, one transparent", png(11, 20, 8, 2, chunk(b"tRNS", struct.pack(">3H", 9, 9, 9)), rows=squares))
    for value in (7, 0x107, 300, 44, 255, 65535):
        greys = b"\0" + b"".join(struct.pack(">H", v) for v in (7, 0x107, 300, 44, 255, 256, 65535, 0))
        add(f"PNG of 16 bits, {value} transparent", png(8, 1, 16, 0, chunk(b"tRNS", struct.pack(">H", value)), rows=greys))
        colour = chunk(b"tRNS", struct.pack(">3H", *[value] * 3))
        add(f"PNG RGB of 16 bits, {value} transparent", png(8, 1, 16, 2, colour, rows=b"\0" + b"".join(struct.pack(">H", v) * 3 for v in (7, 0x107, 300, 44, 255, 256, 65535, 0))))
    for colours in (0, 2, 4, 6):
        add(f"PNG type {colours} of 16 bits", png(6, 5, 16, colours))
        add(f"PNG type {colours} of 16 bits, turned", png(6, 5, 16, colours, chunk(b"eXIf", exif)))
    add("PNG of seven pixels", png(7, 1, 8, 2))


def webps():
    for mode in ("RGB", "RGBA"):
        for lossless in (False, True):
            name = f"WebP {mode}{' lossless' * lossless}"
            add(name, save(picture(mode), "WEBP", lossless=lossless, exact=True))
            for value in range(1, 9):
                turned = save(picture(mode), "WEBP", lossless=lossless, exif=orientation(value, "<>"[value % 2]))
                add(f"{name} orientation {value}", turned)
    add("WebP marked EXIF", save(picture("RGB"), "WEBP", exif=b"Exif\0\0" + orientation(6)))
    add("WebP XMP", save(picture("RGB"), "WEBP", xmp=element.encode()))
    add("WebP XMP beside EXIF", save(picture("RGB"), "WEBP", exif=orientation(3), xmp=element.encode()))
    both = save(picture("RGB"), "WEBP", exif=orientation(6), xmp=element.encode())
    for without in (0b1100, 0b1000, 0b0100):
        add(f"WebP that announces {without:b} too little", both[:20] + bytes([both[20] & ~without]) + both[21:])
    frames = [picture("RGBA", 9, 6) for _ in range(3)]
    add("WebP animated, turned", save(frames[0], "WEBP", save_all=True, append_images=frames[1:], exif=orientation(8)))
    few = picture("RGB").quantize(5)
    add("WebP of a palette", save(few.convert("RGB"), "WEBP", lossless=True))
    add("WebP EXIF of another header", save(picture("RGB"), "WEBP", exif=b"XXXX" + orientation(6)[4:]), unreadable=True)


def gifs():
    for interlaced in (0, 1):
        few = picture("RGB").quantize(13)
        add(f"GIF{' interlaced' * interlaced}", save(few, "GIF", interlace=interlaced))
        add(f"GIF transparent{' interlaced' * interlaced}", save(few, "GIF", interlace=interlaced, transparency=1))
    add("GIF grey", save(picture("L"), "GIF"))
    add("GIF grey transparent", save(Image.frombytes("L", (16, 16), bytes(range(256))), "GIF", transparency=200))
    frames = [picture("RGBA", 20, 17) for _ in range(3)]
    add("GIF animated", save(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2))


def bmps():
    add("BMP", save(picture("RGB"), "BMP"))
    add("BMP palette", save(picture("RGB").quantize(20), "BMP"))
    pixels = chance.randbytes(4 * 45)
    for masks in ((0xFF0000, 0xFF00, 0xFF, 0xFF000000), (0xFF, 0xFF00, 0xFF0000, 0xFF000000)):
        header = struct.pack("<IiiHHIIiiII", 124, 9, 5, 1, 32, 3, len(pixels), 0, 0, 0, 0) + struct.pack("<4I", *masks)
        header = header.ljust(124, b"\0")
        add(f"BMP with alpha {masks[0]:x}", b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(header)) + header + pixels)


def patches():
    """Values of transformers' processor: in files turned and with alpha, larger and smaller than what they are resized to."""
    import torch
    from transformers import NemotronH_Omni_Reasoning_V3ImageProcessor

    made = []
    processor = NemotronH_Omni_Reasoning_V3ImageProcessor(patch_size=4, min_num_patches=4)
    for mode, kind, width, height, turned in (
        ("RGB", "JPEG", 50, 20, 6), ("RGBA", "PNG", 7, 5, 1), ("LA", "PNG", 30, 31, 3), ("RGB", "WEBP", 16, 16, 8),
    ):
        noise = Image.frombytes(mode, (width, height), chance.randbytes(width * height * len(mode)))
        data = save(noise, kind, exif=b"Exif\0\0" + orientation(turned))
        image = Image.open(io.BytesIO(data))
        image.load()
        values = processor(ImageOps.exif_transpose(image), return_tensors="pt", max_model_len=8 + 4)
        rows, columns = values["image_grid_hw"][0].tolist()
        numbers = values["pixel_values"].to(torch.float32).flatten().numpy().tobytes()
        file = base64.b64encode(data).decode()
        made.append({"name": f"{kind} {mode} {width} x {height}", "file": file, "grid": [rows, columns], "values": base64.b64encode(numbers).decode()})
    return made


jpegs()
pngs()
webps()
gifs()
bmps()
processed = patches() if importlib.util.find_spec("transformers") and importlib.util.find_spec("torchvision") else []
with open(output, "w") as written:
    lines = [",\n".join(json.dumps(entry) for entry in entries) for entries in (files, processed)]
    written.write('{\n"files": [\n' + lines[0] + '\n],\n"patches": [\n' + lines[1] + "\n]\n}\n")
