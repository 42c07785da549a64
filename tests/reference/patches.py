"""The pictures of tests/golden/vision-language/expected.json as normalised patches."""
import numpy as np
import torch

PATCH = 8


def patches(rows, columns):
    c, y, x = np.meshgrid(np.arange(3), np.arange(PATCH * rows), np.arange(PATCH * columns), indexing="ij")
    image = torch.from_numpy(((c * 7919 + y * 104729 + x * 1299709 + rows * 31) % 256) / 255.0)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64).view(3, 1, 1)
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64).view(3, 1, 1)
    cut = ((image - mean) / deviation).reshape(3, rows, PATCH, columns, PATCH).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, 3 * PATCH * PATCH)
