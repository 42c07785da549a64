"""
Draws of config.json's fields of small models, by family; `r` draws. `depths` is no field: layers of multi-token prediction, which
transformers' classes lack.
"""


def heads(r, own_size=True):
    """Query heads, key heads, head size and model width."""
    groups, per_group, size = r.choice([1, 2, 2, 3]), r.choice([1, 2, 3]), r.choice([8, 12, 16, 24, 32])
    count = groups * per_group
    width = count * (r.choice([8, 12, 16, 20]) if own_size else size)
    return dict(num_attention_heads=count, num_key_value_heads=groups, hidden_size=width, **({"head_dim": size} if own_size else {}))


def usual(r, layers=(1, 2, 3)):
    return dict(
        num_hidden_layers=r.choice(layers),
        intermediate_size=r.choice([40, 64, 96, 136]),
        vocab_size=r.choice([64, 128, 200, 256]),
        max_position_embeddings=1024,
        rms_norm_eps=r.choice([1e-6, 1e-5, 1e-4]),
        tie_word_embeddings=r.random() < 0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=r.choice([None, None, 0, 5]),
    )


def positions(r, kinds=("default", "default", "linear", "llama3", "yarn"), **more):
    kind, theta = r.choice(kinds), r.choice([1e3, 1e4, 5e5, 1e6])
    rope = dict(rope_type=kind, rope_theta=theta, **more)
    if kind == "linear":
        rope["factor"] = r.choice([2.0, 8.0])
    if kind == "llama3":
        rope |= dict(factor=r.choice([4.0, 8.0]), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=r.choice([32, 64, 256]))
    if kind == "yarn":
        rope |= dict(factor=r.choice([2.0, 8.0, 32.0]), original_max_position_embeddings=r.choice([32, 64, 256]), beta_fast=32.0, beta_slow=1.0)
        if r.random() < 0.5:
            rope["truncate"] = r.random() < 0.5
    return dict(rope_parameters=rope)


def windows(r, layers):
    return dict(
        sliding_window=r.choice([1, 7, 16, 40]),
        layer_types=[r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)],
    )


def routed(r, experts="num_experts", shared=False):
    count, width = r.choice([4, 6, 8, 16]), r.choice([24, 40, 48])
    balanced = r.random() < 0.6
    return {
        experts: count,
        "num_experts_per_tok": r.randint(1, min(4, count)),
        "moe_intermediate_size": width,
        "output_router_logits": balanced,
        "router_aux_loss_coef": r.choice([0.01, 0.05]),
        **({"shared_expert_intermediate_size": r.choice([24, 56])} if shared else {}),
    }


def sparse(r, layers):
    """Layers with experts among those without; the last has some, as transformers' balancing loss wants."""
    only = [layer for layer in range(layers - 1) if r.random() < 0.25]
    return dict(decoder_sparse_step=r.choice([1, 1, layers]), mlp_only_layers=only)


def linear_attention(r, layers):
    keys, size = r.choice([1, 2, 3]), r.choice([8, 16, 24])
    return dict(
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * r.choice([1, 2, 3]),
        linear_key_head_dim=size,
        linear_value_head_dim=r.choice([8, 16, 24]),
        linear_conv_kernel_dim=r.choice([2, 4]),
        layer_types=[r.choice(["linear_attention", "linear_attention", "full_attention"]) for _ in range(layers)],
    )


def llama(r):
    bias = r.random() < 0.3
    return heads(r) | usual(r) | positions(r) | dict(attention_bias=bias, mlp_bias=bias and r.random() < 0.5)


def mistral(r):
    return heads(r) | usual(r) | positions(r) | dict(sliding_window=r.choice([None, 1, 7, 16, 40]))


def qwen2(r):
    c = heads(r, own_size=False) | usual(r) | positions(r)
    on = r.random() < 0.5
    return c | dict(use_sliding_window=on) | (windows(r, c["num_hidden_layers"]) if on else {})


def qwen3(r):
    c = heads(r) | usual(r) | positions(r)
    on = r.random() < 0.5
    return c | dict(use_sliding_window=on) | (windows(r, c["num_hidden_layers"]) if on else {})


def qwen3_moe(r):
    c = heads(r) | usual(r) | positions(r) | routed(r)
    return c | sparse(r, c["num_hidden_layers"]) | dict(norm_topk_prob=r.random() < 0.5)


def qwen3_next(r):
    c = heads(r) | usual(r) | routed(r, shared=True)
    c |= linear_attention(r, c["num_hidden_layers"]) | sparse(r, c["num_hidden_layers"])
    part = r.choice([0.25, 0.5, 1.0]) if c["head_dim"] % 8 == 0 else 0.5
    c |= positions(r, partial_rotary_factor=part) | dict(norm_topk_prob=r.random() < 0.7)
    return c | dict(depths=1 if r.random() < 0.5 else 0)


def qwen3_5_text(r):
    c = heads(r) | usual(r)
    c |= linear_attention(r, c["num_hidden_layers"])
    return c | sections(r, c["head_dim"])


def qwen3_5_moe_text(r):
    c = heads(r) | usual(r) | routed(r, shared=True)
    c |= linear_attention(r, c["num_hidden_layers"]) | sections(r, c["head_dim"])
    return c | dict(depths=1 if r.random() < 0.5 else 0)


def sections(r, size):
    """Frequencies of the three axes, which text turns alike."""
    part = 0.5 if size % 8 else r.choice([0.25, 0.5])
    pairs = int(size * part) // 2
    third = pairs // 3
    more = dict(partial_rotary_factor=part, mrope_interleaved=True, mrope_section=[pairs - 2 * third, third, third])
    return positions(r, kinds=("default",), **more)


def gpt_oss(r):
    c = heads(r) | usual(r) | positions(r, kinds=("default", "yarn")) | dict(attention_bias=True, swiglu_limit=r.choice([1.0, 7.0]))
    experts = r.choice([4, 6, 8])
    return c | windows(r, c["num_hidden_layers"]) | dict(num_local_experts=experts, num_experts_per_tok=r.randint(1, min(4, experts)), intermediate_size=r.choice([24, 48]))


def deepseek_v3(r):
    c = usual(r) | dict(num_attention_heads=r.choice([1, 2, 3, 4]), hidden_size=r.choice([32, 48, 64, 96]))
    rope = positions(r, kinds=("default", "yarn"))
    if rope["rope_parameters"]["rope_type"] == "yarn" and r.random() < 0.6:
        rope["rope_parameters"] |= dict(mscale=r.choice([0.7, 1.0]), mscale_all_dim=r.choice([0.5, 1.0]))
    return c | rope | grouped(r, c["num_hidden_layers"]) | dict(
        num_key_value_heads=c["num_attention_heads"],
        q_lora_rank=r.choice([None, 24, 40]),
        kv_lora_rank=r.choice([16, 24]),
        qk_nope_head_dim=r.choice([8, 16, 24]),
        qk_rope_head_dim=r.choice([8, 16]),
        v_head_dim=r.choice([8, 20, 24]),
        rope_interleave=r.random() < 0.7,
        depths=r.choice([0, 0, 1, 2]),
    )


def grouped(r, layers):
    """Experts of a sigmoid router of groups behind dense layers."""
    groups, kept = r.choice([(1, 1), (2, 2), (3, 2), (4, 2), (4, 1)])
    return dict(
        first_k_dense_replace=r.randint(0, layers),
        n_routed_experts=groups * r.choice([2, 3, 4]),
        n_shared_experts=r.choice([1, 2]),
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=2 * kept,
        norm_topk_prob=True,
        routed_scaling_factor=r.choice([1.0, 2.5]),
        moe_intermediate_size=r.choice([24, 40]),
    )


def glm4_moe(r):
    c = heads(r) | usual(r)
    c |= positions(r, kinds=("default", "default", "yarn"), partial_rotary_factor=0.5 if c["head_dim"] % 8 else r.choice([0.25, 0.5, 1.0]))
    c |= grouped(r, c["num_hidden_layers"]) | dict(attention_bias=r.random() < 0.7, use_qk_norm=r.random() < 0.5)
    return c | dict(num_nextn_predict_layers=0, depths=r.choice([0, 0, 1, 2]))


def gemma3(r):
    c = heads(r) | usual(r)
    whole = positions(r, kinds=("default", "linear"))["rope_parameters"]
    local = positions(r, kinds=("default",))["rope_parameters"]
    rope = dict(rope_parameters=dict(full_attention=whole, sliding_attention=local))
    return c | rope | windows(r, c["num_hidden_layers"]) | dict(tie_word_embeddings=r.random() < 0.7, query_pre_attn_scalar=r.choice([16, 24, 100]))


def nemotron_h(r):
    groups = r.choice([1, 2, 3])
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    router_groups, kept = r.choice([(1, 1), (1, 1), (2, 2), (4, 2)])
    common = usual(r)
    # transformers' class does not tie its head, whatever config.json says.
    return heads(r) | {name: common[name] for name in ("vocab_size", "intermediate_size", "pad_token_id", "max_position_embeddings")} | dict(
        layers_block_type=[r.choice(kinds) for _ in range(r.randint(1, 5))],
        layer_norm_epsilon=r.choice([1e-6, 1e-5, 1e-4]),
        mamba_num_heads=groups * r.choice([1, 2, 3]),
        mamba_head_dim=r.choice([8, 16, 20, 80]),
        n_groups=groups,
        ssm_state_size=r.choice([8, 16, 32]),
        conv_kernel=r.choice([2, 4]),
        chunk_size=r.choice([16, 32]),
        time_step_min=1e-6,
        n_routed_experts=router_groups * r.choice([2, 4]),
        n_group=router_groups,
        topk_group=kept,
        num_experts_per_tok=2 * kept,
        norm_topk_prob=True,
        routed_scaling_factor=r.choice([1.0, 2.5]),
        moe_intermediate_size=r.choice([24, 40]),
        moe_shared_expert_intermediate_size=r.choice([24, 56]),
        moe_latent_size=r.choice([None, 16, 24]),
        bos_token_id=1,
        eos_token_id=2,
    )
