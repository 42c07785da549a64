"""Times PyTorch on cases given as JSON on standard input; answers each line of it with a line on standard output.

The first sets up: {"threads": 2, "cases": [{"kind": "attention", ...sizes}, {"kind": "scan", ...sizes}, {"kind": "step",
"golden": DIR}]} is answered by {"version": ..., "implementation": ..., "losses": [loss of a first step or null]}. Every
later one, [case, calls], is answered by the seconds of a call.
"""

import json
import struct
import sys
import time

import torch
import torch.nn.functional as F

import pytorch_nemotron
from pytorch_values import plain

try:
    from transformers import NemotronHConfig, NemotronHForCausalLM
    from transformers.models.nemotron_h import modeling_nemotron_h
except ImportError:
    NemotronHForCausalLM = None

def seconds_of(run, calls):
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started) / calls


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def attention_case(case):
    batch, length, queries, keys, width = (case[name] for name in ("batch", "length", "queries", "keys", "width"))
    q, k, v = leaf(batch, queries, length, width), leaf(batch, keys, length, width), leaf(batch, keys, length, width)
    gradient = torch.randn(batch, queries, length, width)

    def run():
        for tensor in (q, k, v):
            tensor.grad = None
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(gradient)

    return run, None


def scan_case(case):
    batch, length, heads, width = (case[name] for name in ("batch", "length", "heads", "width"))
    groups, state, chunk = case["groups"], case["state"], case["chunk"]
    x, z, dt = leaf(batch, length, heads, width), leaf(batch, length, heads, width), leaf(batch, length, heads)
    B, C = leaf(batch, length, groups, state), leaf(batch, length, groups, state)
    A_log, D, dt_bias = torch.rand(heads, requires_grad=True), leaf(heads), leaf(heads)
    leaves = (x, z, dt, B, C, A_log, D, dt_bias)
    gradient = torch.randn(batch, length, heads, width)

    def scan(A):
        if NemotronHForCausalLM is None:
            return pytorch_nemotron.chunk_scan(x, dt, A, B, C, D, dt_bias, chunk)
        scan = getattr(modeling_nemotron_h, "mamba2_chunk_scan")
        return scan(x, dt, A, B, C, chunk_size=chunk, D=D, dt_bias=dt_bias, dt_softplus=True)

    def run():
        for tensor in leaves:
            tensor.grad = None
        (scan(-torch.exp(A_log)) * F.silu(z)).backward(gradient)

    return run, None


def read_safetensors(path):
    kinds = {"F32": torch.float32, "I32": torch.int32}
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    return {
        name: torch.frombuffer(data[begin:end], dtype=kinds[entry["dtype"]]).reshape(entry["shape"]).clone()
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def step_case(case):
    folder = case["golden"]
    with open(f"{folder}/config.json") as file:
        config = {name: plain(value) for name, value in json.load(file).items()}
    with open(f"{folder}/golden.json") as file:
        optimizer = json.load(file)["optimizer"]
    weights = read_safetensors(f"{folder}/model.safetensors")
    batch = read_safetensors(f"{folder}/batches.safetensors")["tokens"][0].long()
    if NemotronHForCausalLM is not None:
        arguments = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version")}
        model = NemotronHForCausalLM(NemotronHConfig(**arguments))
        model.load_state_dict(weights)
        parameters = dict(model.named_parameters())
        forward = lambda tokens: model(input_ids=tokens, use_cache=False).logits  # noqa: E731
    else:
        trained = {name: w.requires_grad_(not name.endswith("e_score_correction_bias")) for name, w in weights.items()}
        parameters = {name: w for name, w in trained.items() if w.requires_grad}
        forward = lambda tokens: pytorch_nemotron.logits(trained, config, tokens)  # noqa: E731
    undecayed = set(optimizer["no_weight_decay"])
    groups = [
        {"params": [w for n, w in parameters.items() if n not in undecayed], "weight_decay": optimizer["weight_decay"]},
        {"params": [w for n, w in parameters.items() if n in undecayed], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer["lr"], betas=optimizer["betas"], eps=optimizer["eps"])

    def run():
        adamw.zero_grad()
        loss = F.cross_entropy(forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), optimizer["clip_grad"])
        adamw.step()
        return loss.item()

    return run, run()


def main():
    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    torch.manual_seed(1)
    kinds = {"attention": attention_case, "scan": scan_case, "step": step_case}
    cases = [kinds[case["kind"]](case) for case in request["cases"]]
    implementation = "plain PyTorch" if NemotronHForCausalLM is None else "Hugging Face"
    version = f"PyTorch {torch.__version__}"
    losses = [loss for _, loss in cases]
    print(json.dumps({"version": version, "implementation": implementation, "losses": losses}), flush=True)
    for line in sys.stdin:
        case, calls = json.loads(line)
        print(seconds_of(cases[case][0], calls), flush=True)


main()
