"""Samples a second of processor time: energon_reference.py PATH raw|decoded SECONDS; one process of megatron-energon."""

import sys
import time
import warnings

warnings.filterwarnings("ignore")
from megatron.energon import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_loader, get_train_dataset  # noqa: E402

BATCH = 32
path, mode, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])


class Samples(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode="pilrgb") if mode == "decoded" else None

    def encode_sample(self, sample):
        return sample

    def batch(self, samples):
        return samples

    def encode_batch(self, batch):
        return batch


dataset = get_train_dataset(
    path,
    worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    batch_size=BATCH,
    task_encoder=Samples(),
    shuffle_buffer_size=None,
    max_samples_per_sequence=None,
)
batches = iter(get_loader(dataset))
for _ in range(4):
    next(batches)
started, used = time.perf_counter(), time.process_time()
count = 0
while time.perf_counter() - started < seconds:
    next(batches)
    count += BATCH
print(count / (time.process_time() - used))
