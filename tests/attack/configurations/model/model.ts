/**
 * Tiny models with every option that a configuration has, drawn from a seed. Sizes divide one another where they mostly
 * have to; what is refused all the same is drawn again.
 */
import { numbersFrom } from "../../src/parity/verify/samples.ts";

/** Values of configuration keys as flags spell them. */
export type Flags = Readonly<Record<string, string>>;

export class Draw {
	readonly #next: () => number;

	constructor(seed: number) {
		this.#next = numbersFrom(seed);
	}

	chance(probability: number): boolean {
		return this.#next() < probability;
	}

	one<Value>(values: readonly Value[]): Value {
		return values[Math.floor(this.#next() * values.length)]!;
	}

	/** A whole number from `least` to `most`. */
	whole(least: number, most: number): number {
		return least + Math.floor(this.#next() * (most - least + 1));
	}

	/** `flags` with a probability, or none. */
	sometimes(probability: number, flags: () => Flags): Flags {
		return this.chance(probability) ? flags() : {};
	}
}

export function argumentsOf(flags: Flags): string[] {
	return Object.entries(flags).map(([key, value]) => `--${key}=${value}`);
}

const on = "true";

/** Layers; experts and Mamba-2 are most of what the models are made of. */
function drawPattern(draw: Draw): string {
	const layers = Array.from({ length: draw.whole(2, 6) }, () => draw.one([..."MMM***--EEEE"]));
	if (draw.chance(0.2)) return grouped(draw, layers);
	if (draw.chance(0.4)) {
		// An empty segment is allowed.
		for (let cuts = draw.one([1, 1, 3]); cuts > 0; cuts--) layers.splice(draw.whole(0, layers.length), 0, "|");
	}
	return layers.join("");
}

/** The layers with some of them in brackets, of which E can be the last alone. */
function grouped(draw: Draw, layers: readonly string[]): string {
	const pieces: string[] = [];
	for (let at = 0; at < layers.length; ) {
		const wanted = draw.whole(1, 3);
		const expert = layers.slice(at, at + wanted).indexOf("E");
		const length = Math.min(expert < 0 ? wanted : expert + 1, layers.length - at);
		const block = layers.slice(at, at + length).join("");
		pieces.push(length === 1 ? block : `[${block}]`);
		at += length;
	}
	return pieces.join(draw.chance(0.3) ? "|" : "");
}

function drawMtp(draw: Draw): Flags {
	return {
		"mtp-loss-scaling-factor": draw.one(["0.1", "0.5"]),
		...draw.sometimes(0.4, () => ({ "mtp-use-repeated-layer": on })),
	};
}

function drawActivation(draw: Draw): Flags {
	const clamp = () => draw.sometimes(0.3, () => ({ "activation-func-clamp-value": draw.one(["0.05", "0.5", "7"]) }));
	switch (draw.whole(0, 4)) {
		case 0:
			return {};
		case 1:
			return { "squared-relu": on };
		case 2:
			return {
				"quick-geglu": on,
				...clamp(),
				...draw.sometimes(0.5, () => ({ "glu-linear-offset": draw.one(["1", "-0.5"]) })),
			};
		default:
			return { swiglu: on, ...clamp() };
	}
}

function drawAttention(draw: Draw): Flags {
	const groups = draw.one([1, 2, 2, 2, 4]);
	const rope = (): Flags => ({
		"position-embedding-type": "rope",
		"rotary-base": draw.one(["10000", "500"]),
		"rotary-percent": draw.one(["1", "0.5", "0.25"]),
	});
	return {
		"num-query-groups": String(groups),
		"num-attention-heads": String(groups * draw.whole(1, 3)),
		"kv-channels": draw.one(["4", "8", "8", "16", "6", "5", "24"]),
		...draw.sometimes(0.4, rope),
	};
}

function drawMamba(draw: Draw): Flags {
	const groups = draw.one([1, 2, 2, 2, 4]);
	return {
		"mamba-num-groups": String(groups),
		"mamba-num-heads": String(groups * draw.whole(1, 3)),
		"mamba-head-dim": draw.one(["4", "8", "16", "5"]),
		"mamba-state-dim": draw.one(["4", "8", "16", "7"]),
		"mamba-conv-kernel-dim": draw.one(["4", "4", "2", "3", "1", "5"]),
		"mamba-chunk-size": draw.one(["4", "8", "5", "128"]),
	};
}

function drawRouter(draw: Draw): Flags {
	const experts = draw.one([2, 4, 4, 8, 8, 6]);
	const sigmoid = draw.chance(0.5);
	const groups = draw.chance(0.25) ? 2 : 1;
	const topk = groups === 2 ? draw.one([2, 4]) : draw.whole(1, Math.min(4, experts));
	const balancing = draw.one([
		["none"],
		["aux_loss"],
		["seq_aux_loss"],
		["seq_aux_loss"],
		["aux_loss", "seq_aux_loss"],
		["global_aux_loss"],
	]);
	return {
		"num-experts": String(experts),
		"moe-router-topk": String(topk),
		"moe-router-score-function": sigmoid ? "sigmoid" : "softmax",
		"moe-router-load-balancing-type": balancing.join(","),
		"moe-aux-loss-coeff": balancing.map((name) => (name === "none" ? "0" : draw.one(["0", "0.01", "0.1"]))).join(","),
		...draw.sometimes(0.5, () => ({ "moe-router-pre-softmax": on })),
		...draw.sometimes(0.5, () => ({ "moe-router-topk-scaling-factor": "2.5" })),
		...draw.sometimes(0.3, () => ({ "moe-z-loss-coeff": "0.01" })),
		...draw.sometimes(sigmoid ? 0.5 : 0, () => ({
			"moe-router-enable-expert-bias": on,
			"moe-router-bias-update-rate": draw.one(["0", "0.001", "0.05"]),
		})),
		...(groups === 2 && { "moe-router-num-groups": "2", "moe-router-group-topk": draw.one(["1", "2"]) }),
		...draw.sometimes(0.06, () => ({ "moe-router-force-load-balancing": on })),
	};
}

function drawExperts(draw: Draw): Flags {
	return {
		...drawRouter(draw),
		"moe-ffn-hidden-size": draw.one(["8", "16", "16", "24", "12"]),
		"moe-shared-expert-intermediate-size": draw.one(["0", "0", "8", "16"]),
		"moe-fused-mlp": draw.one(["auto", "auto", "off", "on"]),
		...draw.sometimes(0.15, () => ({ "moe-mlp-glu-interleave-size": draw.one(["2", "4", "8"]) })),
		...draw.sometimes(0.1, () => ({ "moe-expert-capacity-bound": draw.one(["8", "64"]) })),
		...draw.sometimes(0.15, () => ({ "moe-token-dispatcher-type": "allgather" })),
		...draw.sometimes(0.2, () => ({
			"moe-token-dispatcher-type": "flex",
			"moe-hybridep-ranks-per-nvlink-domain": draw.one(["1", "2", "8"]),
		})),
		...draw.sometimes(0.08, () => ({
			"fp8-format": "e4m3",
			"fp8-recipe": "blockwise",
			"fp8-emulate": on,
			...draw.sometimes(0.5, () => ({ "fp8-wgrad": on })),
		})),
	};
}

/** Sizes that differ from layer to layer. */
function drawPerLayer(draw: Draw, pattern: string, flags: Flags): Flags {
	const main = pattern.split("/")[0]!;
	const list = (symbol: string, size: () => number): string =>
		Array.from({ length: main.split(symbol).length - 1 }, size).join(",");
	const lists: Flags = {
		"mamba-num-heads-per-layer": list("M", () => Number(flags["mamba-num-groups"]) * draw.whole(1, 3)),
		"num-attention-heads-per-layer": list("*", () => Number(flags["num-query-groups"]) * draw.whole(1, 3)),
		"num-experts-per-layer": list("E", () => Number(flags["num-experts"]) * draw.whole(1, 2)),
		"moe-ffn-hidden-size-per-layer": list("E", () => 8 * draw.whole(1, 3)),
	};
	return Object.fromEntries(Object.entries(lists).filter(([, sizes]) => sizes !== "" && draw.chance(0.6)));
}

const projections = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"];

function drawAdapters(draw: Draw): Flags {
	const experts = draw.chance(0.3);
	const targets = projections.filter(() => draw.chance(0.6));
	return {
		"lora-rank": draw.one(["1", "2", "4"]),
		"lora-alpha": draw.one(["8", "32"]),
		...draw.sometimes(experts ? 0 : 0.3, () => ({ "lora-dropout": "0.2" })),
		"lora-target-modules": [
			...(targets.length === 0 ? ["linear_fc1", "linear_qkv", "in_proj"] : targets),
			...(experts ? ["experts.linear_fc1", "experts.linear_fc2"] : []),
		].join(","),
	};
}

/** Two sizes of an axis whose layers the pattern has, the parent's and a smaller one. */
function drawSizes(draw: Draw, flags: Flags): Flags {
	const axes = [
		["emb", "", "hidden-size", 8],
		["mamba", "M", "mamba-num-heads", Number(flags["mamba-num-groups"])],
		["mlp", "E", "moe-ffn-hidden-size", 4],
		["moe-expert", "E", "num-experts", Number(flags["moe-router-topk"])],
		["head", "*", "num-attention-heads", Number(flags["num-query-groups"])],
	] as const;
	const lists = axes.flatMap(([axis, symbol, key, least]) => {
		const parent = Number(flags[key]);
		if (!flags["hybrid-layer-pattern"]!.includes(symbol) || !(parent > least)) return [];
		return draw.chance(0.6) ? [[`${axis}-int-list`, `${parent},${least}`] as const] : [];
	});
	return Object.fromEntries(lists);
}

function drawElastic(draw: Draw, flags: Flags): Flags {
	const hetero = ["mamba", "ffn", "moe-expert", "head"].filter(() => draw.chance(0.3));
	return {
		flextron: on,
		"enable-router": on,
		"router-inter-dim": "8",
		"budget-list": draw.one(["1", "1,0.8", "1,0.9,0.7"]),
		"original-model-sample-prob": draw.one(["0", "0.33", "1"]),
		"loss-alpha": draw.one(["0", "1"]),
		...drawSizes(draw, flags),
		...Object.fromEntries(hetero.map((axis) => [`flex-hetero-${axis}`, on])),
		...draw.sometimes(0.4, () => ({ "soft-mask": on })),
		...draw.sometimes(0.3, () => ({ "add-skipping": on, "layer-ranking-list": draw.one(["0", "1", "1,0"]) })),
		...draw.sometimes(0.2, () => ({ "normalize-router-logits": on })),
		...draw.sometimes(0.2, () => draw.one<Flags>([{ "freeze-router": on }, { "freeze-model": on }])),
		...draw.sometimes(0.3, () => ({
			"self-distillation": on,
			"export-kd-alpha": draw.one(["1", "0.5"]),
			"export-kd-temperature": draw.one(["1", "2"]),
		})),
		...draw.sometimes(0.1, () => ({ "flextron-compat": on })),
	};
}

const modules = ["core_attn", "layernorm", "mamba", "mlp", "moe", "moe_act", "shared_experts"];

/** Options that change no value of a training, bit for bit. */
export function drawRecomputation(draw: Draw): Flags {
	if (draw.chance(0.5)) {
		return {
			"recompute-granularity": "full",
			"recompute-method": draw.one(["uniform", "block"]),
			"recompute-num-layers": draw.one(["1", "2", "3"]),
		};
	}
	const chosen = modules.filter(() => draw.chance(0.5));
	return {
		"recompute-granularity": "selective",
		...(chosen.length > 0 && { "recompute-modules": chosen.join(",") }),
	};
}

/** The order of the work of a step, which changes no value. */
export function drawWorkOrder(draw: Draw): Flags {
	return {
		...draw.sometimes(0.3, () => drawRecomputation(draw)),
		...draw.sometimes(0.3, () => ({ "delay-wgrad-compute": on })),
	};
}

/** Passes in turns, which grids allow where experts lie on several ranks. */
export function drawTurns(draw: Draw): Flags {
	return {
		"overlap-moe-expert-parallel-comm": on,
		...draw.sometimes(0.3, () => ({ "ep-overlap-early-attn-memory-release": on })),
	};
}

function drawVision(draw: Draw): Flags {
	const patch = draw.one([4, 8]);
	const side = () => String(patch * 2 * draw.whole(1, 2));
	return {
		"model-provider": "nemotron-moe-vlm",
		"image-token-id": draw.one(["63", "5"]),
		"vision-num-layers": draw.one(["1", "2"]),
		"vision-hidden-size": draw.one(["16", "24"]),
		"vision-num-attention-heads": draw.one(["2", "4"]),
		"vision-ffn-hidden-size": draw.one(["16", "48"]),
		...draw.sometimes(0.3, () => ({ "vision-kv-channels": draw.one(["4", "12"]) })),
		"vision-max-img-h": String(patch * draw.whole(4, 8)),
		"vision-max-img-w": String(patch * draw.whole(4, 8)),
		"vision-position-mode": draw.one(["cpe", "cpe", "direct", "window"]),
		...draw.sometimes(0.5, () => ({ "vision-position-crop": "false" })),
		...draw.sometimes(0.3, () => ({ "vision-final-layernorm": "false" })),
		"vision-activation": draw.one(["gelu-tanh", "gelu"]),
		"class-token-len": draw.one(["0", "1", "4"]),
		"patch-dim": String(patch),
		"img-h": side(),
		"img-w": side(),
		...draw.one<Flags>([
			{},
			{ "disable-vision-class-token": on },
			{ "pixel-shuffle": on, "disable-vision-class-token": on },
		]),
		...draw.sometimes(0.5, () => ({ "dynamic-resolution": on })),
		...draw.one<Flags>([
			{},
			{ "vision-projection-type": "mlp", "vision-projection-ffn-hidden-size": "24" },
			{ "vision-projection-type": "mlp", "vision-projection-norm": on },
		]),
		...draw.sometimes(0.15, () => ({ "freeze-vit": on })),
		...draw.sometimes(0.15, () => ({ "freeze-projection": on })),
		...draw.sometimes(0.1, () => ({ "freeze-lm": on })),
		"encoder-balance": draw.one(["cost", "number"]),
	};
}

function drawOptimizer(draw: Draw): Flags {
	return {
		lr: "0.01",
		"min-lr": "0.001",
		"lr-decay-style": draw.one(["constant", "linear", "cosine", "inverse-square-root"]),
		// Noise of gradients that are zero would become steps of full size.
		"adam-eps": "0.001",
		"adam-beta2": draw.one(["0.999", "0.95"]),
		"weight-decay": draw.one(["0", "0.1"]),
		"clip-grad": draw.one(["0", "0.05", "1"]),
		...draw.sometimes(0.2, () => ({ "lr-warmup-iters": "2" })),
	};
}

/** A model and what is trained of it; sizes of batches fit two lanes. */
export function drawModel(draw: Draw): Flags {
	const layers = drawPattern(draw);
	const mtp = draw.chance(0.15) ? `/${draw.one(["M", "*", "E", "*E", "-"])}` : "";
	const pattern = layers + mtp.repeat(draw.whole(1, 2));
	const vision = draw.chance(0.35);
	const sizes: Flags = {
		"hybrid-layer-pattern": pattern,
		"hidden-size": draw.one(["16", "24", "32", "48"]),
		"ffn-hidden-size": draw.one(["16", "24", "48"]),
		"vocab-size": draw.one(["64", "64", "67", "100"]),
		"make-vocab-size-divisible-by": draw.one(["4", "8", "128"]),
		"seq-length": vision ? draw.one(["48", "64"]) : draw.one(["8", "12", "16", "24", "32"]),
		"micro-batch-size": draw.one(["1", "2", "2"]),
		"global-batch-size": draw.one(["4", "8", "8"]),
		"init-method-std": draw.one(["0.1", "0.2"]),
		seed: String(draw.whole(1, 1_000_000)),
		...drawAttention(draw),
		...drawMamba(draw),
		...(pattern.includes("E") && drawExperts(draw)),
	};
	const trained: Flags = draw.chance(0.1) ? drawElastic(draw, sizes) : draw.sometimes(0.12, () => drawAdapters(draw));
	return {
		...sizes,
		...(mtp !== "" && drawMtp(draw)),
		...drawActivation(draw),
		...(vision && drawVision(draw)),
		...trained,
		...drawOptimizer(draw),
		...drawWorkOrder(draw),
		...draw.sometimes(0.08, () => drawPerLayer(draw, pattern, sizes)),
		...draw.sometimes(0.2, () => ({ "add-bias-linear": on, "moe-shared-expert-intermediate-size": "0" })),
		...draw.sometimes(0.3, () => ({ "untie-embeddings-and-output-weights": "false" })),
		...draw.sometimes(0.15, () => ({ "hidden-dropout": "0.1" })),
		...draw.sometimes(0.15, () => ({ "attention-dropout": "0.1" })),
		...draw.sometimes(0.15, () => ({ "z-loss-coeff": "0.001" })),
		...draw.sometimes(0.1, () => ({ "embedding-init-method-std": "1" })),
	};
}
