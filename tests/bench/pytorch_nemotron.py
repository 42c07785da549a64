"""NemotronH in plain PyTorch, computed as Hugging Face transformers computes it without its GPU kernels.

For machines that have PyTorch but not transformers. Names of parameters are Hugging Face's; a model is a dict of them.
"""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, epsilon, group=None):
    width = x.shape[-1]
    parts = x.view(*x.shape[:-1], -1, group or width)
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * parts.view_as(x)


def segment_sum(x):
    """[..., L] → [..., L, L]: sums of x over (s, l], minus infinity above the diagonal."""
    size = x.size(-1)
    x = x[..., None].expand(*x.size(), size)
    x = x.masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool), diagonal=-1), 0)
    total = torch.cumsum(x, dim=-2)
    return total.masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool)), -torch.inf)


def chunk_scan(x, dt, A, B, C, D, dt_bias, chunk):
    """Mamba-2's scan. x [b, t, h, p], dt [b, t, h], A, D, dt_bias [h], B and C [b, t, g, n] → [b, t, h, p]."""
    batch, length, heads, width = x.shape
    dt = F.softplus(dt + dt_bias)
    repeats = heads // B.shape[2]
    B, C = B.repeat_interleave(repeats, dim=2), C.repeat_interleave(repeats, dim=2)
    pad = -length % chunk
    skip = D[:, None] * x

    def chunks(tensor):
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, pad))
        return tensor.reshape(batch, -1, chunk, *tensor.shape[2:])

    x, a, B, C = chunks(x * dt[..., None]), chunks(A * dt), chunks(B), chunks(C)
    a = a.permute(0, 3, 1, 2)
    cumulative = torch.cumsum(a, dim=-1)
    scores = torch.einsum("bclhn,bcshn->bclsh", C, B) * torch.exp(segment_sum(a)).permute(0, 2, 3, 4, 1)
    inside = torch.einsum("bclsh,bcshp->bclhp", scores, x)
    decay = torch.exp(cumulative[..., -1:] - cumulative)
    states = torch.einsum("bclhn,bclhp->bchpn", B * decay.permute(0, 2, 3, 1)[..., None], x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segment_sum(F.pad(cumulative[..., -1], (1, 0)))).transpose(1, 3)
    states = torch.einsum("bzch,bzhpn->bchpn", between, states)[:, :-1]
    outside = torch.einsum("bclhn,bchpn->bclhp", C, states) * torch.exp(cumulative).permute(0, 2, 3, 1)[..., None]
    return (inside + outside).reshape(batch, -1, heads, width)[:, :length] + skip


def mamba(x, w, c):
    heads, width, groups, state = c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"], c["ssm_state_size"]
    inner = heads * width
    batch, length, _ = x.shape
    z, xbc, dt = F.linear(x, w("in_proj.weight")).split([inner, inner + 2 * groups * state, heads], dim=-1)
    taps = w("conv1d.weight")
    xbc = F.conv1d(xbc.transpose(1, 2), taps, w("conv1d.bias"), padding=taps.shape[-1] - 1, groups=taps.shape[0])
    h, B, C = F.silu(xbc[..., :length]).transpose(1, 2).split([inner, groups * state, groups * state], dim=-1)
    y = chunk_scan(
        h.reshape(batch, length, heads, width),
        dt,
        -torch.exp(w("A_log")),
        B.reshape(batch, length, groups, state),
        C.reshape(batch, length, groups, state),
        w("D"),
        w("dt_bias"),
        c["chunk_size"],
    )
    y = y.reshape(batch, length, inner) * F.silu(z)
    return F.linear(rms_norm(y, w("norm.weight"), c["layer_norm_epsilon"], inner // groups), w("out_proj.weight"))


def attention(x, w, c):
    def heads(name):
        return F.linear(x, w(name)).view(*x.shape[:2], -1, c["head_dim"]).transpose(1, 2)

    q, k, v = heads("q_proj.weight"), heads("k_proj.weight"), heads("v_proj.weight")
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(o.transpose(1, 2).reshape(*x.shape[:2], -1), w("o_proj.weight"))


def mlp(x, up, down):
    return F.linear(F.relu(F.linear(x, up)).square(), down)


def experts(x, w, c):
    tokens = x.reshape(-1, x.shape[-1])
    scores = F.linear(tokens, w("gate.weight")).sigmoid()
    chosen = torch.topk(scores + w("gate.e_score_correction_bias"), c["num_experts_per_tok"], dim=-1)[1]
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
    up, down = w("experts.up_proj"), w("experts.down_proj")
    y = torch.zeros_like(tokens)
    for expert in range(up.shape[0]):
        token, place = torch.where(chosen == expert)
        if token.numel() > 0:
            out = mlp(tokens[token], up[expert], down[expert])
            y.index_add_(0, token, out * weights[token, place, None])
    return y.view_as(x) + mlp(x, w("shared_experts.up_proj.weight"), w("shared_experts.down_proj.weight"))


def logits(parameters, c, tokens):
    """tokens [batch, sequence] → [batch, sequence, vocabulary]."""
    kinds = {
        "linear_attention": mamba,
        "full_attention": attention,
        "moe": experts,
        "mlp": lambda x, w, c: mlp(x, w("up_proj.weight"), w("down_proj.weight")),
    }
    epsilon = c["layer_norm_epsilon"]
    x = F.embedding(tokens, parameters["model.embeddings.weight"])
    for index, kind in enumerate(c["layers_block_type"]):
        prefix = f"model.layers.{index}."
        h = rms_norm(x, parameters[prefix + "norm.weight"], epsilon)
        x = x + kinds[kind](h, lambda name: parameters[prefix + "mixer." + name], c)
    return F.linear(rms_norm(x, parameters["model.norm_f.weight"], epsilon), parameters["lm_head.weight"])
