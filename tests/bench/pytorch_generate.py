"""Times greedy decoding of a small NemotronH with Hugging Face transformers, asked line by line on standard input.

The first line {"threads": 2, "folder": DIR} makes the model: fp32 in DIR/f32 and bf16 in DIR/bf16 as save_pretrained writes
them; it is answered by {"version": ..., "parameters": ...}. Every later line {"dtype": "f32", "prompt": [[ids] ...],
"tokens": N} is answered by {"prefill": seconds, "decode": seconds a step, "processor":
seconds of processor time a step, "ids": [[ids] ...]}: model.generate, greedy, with its
cache; prefill is the time to the first token.
"""

import json
import sys
import time

import torch
import transformers
from transformers import NemotronHConfig, NemotronHForCausalLM, StoppingCriteria, StoppingCriteriaList

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


def make(folder):
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=16384,
        hidden_size=768,
        layers_block_type=[KINDS[symbol] for symbol in "M-M-M*-M-M-M*-"],
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=3072,
        ssm_state_size=128,
        mamba_num_heads=24,
        mamba_head_dim=64,
        n_groups=8,
        # A wide head: the likeliest token is clear, and rounding does not choose another.
        initializer_range=0.05,
        max_position_embeddings=4096,
    )
    model = NemotronHForCausalLM(config).eval()
    models = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        model = model.to(dtype)
        model.save_pretrained(f"{folder}/{name}")
        models[name] = NemotronHForCausalLM.from_pretrained(f"{folder}/{name}", dtype=dtype).eval()
    return models


class Clock(StoppingCriteria):
    """Notes when every token is there."""

    def __init__(self):
        self.times = []
        self.processor_times = []

    def __call__(self, ids, scores, **_):
        self.times.append(time.perf_counter())
        self.processor_times.append(time.process_time())
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def answer(model, prompt, tokens):
    ids = torch.tensor(prompt)
    clock = Clock()
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    first, last = clock.times[0], clock.times[-1]
    return {
        "prefill": first - started,
        "decode": (last - first) / (tokens - 1),
        "processor": (clock.processor_times[-1] - clock.processor_times[0]) / (tokens - 1),
        "ids": out[:, ids.shape[1] :].tolist(),
    }


def main():
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    models = make(setup["folder"])
    parameters = sum(parameter.numel() for parameter in models["f32"].parameters())
    version = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"version": version, "parameters": parameters}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(models[asked["dtype"]], asked["prompt"], asked["tokens"])), flush=True)


if __name__ == "__main__":
    main()
