"""Draws of config.json's fields of small vision towers; `r` draws."""


def tower(r, names):
    """Sizes under a family's own names of layers and heads."""
    count, size = r.choice([1, 2, 3]), r.choice([8, 12, 16])
    return {
        "hidden_size": count * size,
        "intermediate_size": r.choice([20, 40, 56]),
        names[0]: r.choice([1, 2, 3, 4]),
        names[1]: count,
        "patch_size": r.choice([2, 4, 5]),
    }


def qwen_tower(r, deep):
    c = tower(r, ("depth", "num_heads"))
    taps = sorted(r.sample(range(c["depth"]), r.randint(0, min(3, c["depth"])))) if deep else None
    return c | dict(
        temporal_patch_size=r.choice([1, 2, 2]),
        num_position_embeddings=r.choice([1, 2, 3, 4, 7]) ** 2,
        hidden_act=r.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu"]),
        **({} if taps is None else dict(deepstack_visual_indexes=taps)),
    )


def qwen25_tower(r):
    c = tower(r, ("depth", "num_heads"))
    whole = sorted(r.sample(range(c["depth"]), r.randint(0, c["depth"])))
    return c | dict(
        temporal_patch_size=r.choice([1, 2, 2]),
        window_size=r.choice([2, 4, 6, 8]) * c["patch_size"] + r.choice([0, 0, 1]),
        fullatt_block_indexes=whole,
        tokens_per_second=r.choice([2, 4]),
    )


def glm_tower(r, width):
    c = tower(r, ("depth", "num_heads"))
    return c | dict(
        image_size=c["patch_size"] * r.randint(2, 6) + r.choice([0, 0, 1]),
        temporal_patch_size=r.choice([1, 2, 2]),
        attention_bias=r.random() < 0.3,
        rms_norm_eps=r.choice([1e-6, 1e-5, 1e-4]),
        out_hidden_size=width,
    )


def internvit(r):
    c = tower(r, ("num_hidden_layers", "num_attention_heads"))
    side = c["patch_size"] * 2 * r.randint(1, 4)
    norm = r.choice(["layer_norm", "rms_norm"])
    return c | dict(
        image_size=r.choice([side, [side, side]]),
        attention_bias=r.random() < 0.5,
        use_qk_norm=r.random() < 0.5,
        norm_type=norm,
        layer_norm_eps=r.choice([1e-6, 1e-5]),
        layer_scale_init_value=r.choice([0.1, 1.0]),
        use_mean_pooling=norm == "rms_norm" or r.random() < 0.7,
        hidden_act=r.choice(["gelu", "gelu", "gelu_pytorch_tanh"]),
    )


def siglip(r):
    c = tower(r, ("num_hidden_layers", "num_attention_heads"))
    return c | dict(
        model_type="siglip_vision_model",
        image_size=c["patch_size"] * r.randint(2, 6) + r.choice([0, 0, 1]),
        layer_norm_eps=r.choice([1e-6, 1e-5]),
        hidden_act=r.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu"]),
        vision_use_head=False,
    )


def siglip2(r):
    c = siglip(r)
    del c["image_size"]
    return c | dict(model_type="siglip2_vision_model", num_patches=r.randint(2, 5) ** 2)


def radio(r):
    c = tower(r, ("num_hidden_layers", "num_attention_heads"))
    del c["intermediate_size"]
    classes = r.choice([1, 2])
    return c | dict(
        model_type="radio",
        mlp_ratio=r.choice([2.0, 2.5, 4.0]),
        max_img_size=c["patch_size"] * r.randint(2, 8),
        num_cls_tokens=classes,
        num_registers=r.choice([0, 1, 3]),
        summary_idxs=[0],
        video_temporal_patch_size=2,
        hidden_act=r.choice(["gelu", "gelu", "gelu_pytorch_tanh"]),
    )
