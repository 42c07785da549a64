"""Least seconds of a Gloo all-reduce of two processes with a thread each, by size in bytes: python pytorch_gloo.py BYTES ..."""
import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def work(rank, port, sizes):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    least = {}
    for size in sizes:
        x = torch.zeros(size // 4)
        times = []
        for _ in range(400 if size <= 65536 else 40):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - start)
        least[size] = min(times)
    if rank == 0:
        print(json.dumps(least))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (free_port(), [int(size) for size in sys.argv[1:]]), 2)
