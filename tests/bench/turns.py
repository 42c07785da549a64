"""Times of contenders on one GPU that run in turn."""

import statistics
import time

import torch


def milliseconds_of(run, seconds):
    """Mean of the queued calls of so many seconds."""
    torch.cuda.synchronize()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or calls < 3:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        calls += 3
    return 1000 * (time.perf_counter() - started) / calls


def medians(runs, rounds):
    """Milliseconds of each: the median of rounds in which every contender runs 80 ms untimed, then 40 ms timed."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            milliseconds_of(run, 0.08)
            times[name].append(milliseconds_of(run, 0.04))
    return {name: statistics.median(values) for name, values in times.items()}
