/** Options of drawn runs: grids, those that change no value, those that change the order of sums alone. */
import { type Draw, type Flags, on } from "../draw.ts";
import { hasEncoder } from "../model/vision.ts";
import { drawAllowedGrids, type Grids, refusal } from "./grids.ts";
import { drawRecomputation, drawTurns } from "./work-order.ts";

/** Grids, of one process or several, with turns of passes where they allow them. */
export function onGrids(draw: Draw, flags: Flags): Flags {
	const [grids] = draw.chance(0.25) ? [] : drawAllowedGrids(draw, flags, 1, () => {});
	const gridded = { ...flags, ...withWeightShards(draw, grids?.flags ?? {}), ...drawReduction(draw, flags) };
	const turned = { ...gridded, ...drawTurns(draw) };
	return draw.chance(0.2) && refusal(turned) === null ? turned : gridded;
}

/** Sometimes the data lanes as shards of weights, which are lanes here. */
function withWeightShards(draw: Draw, grids: Flags): Flags {
	if (grids["llm-dp"] === undefined || draw.chance(0.8)) return grids;
	const shards = Number(grids["llm-tp"]) * Number(grids["llm-dp"]);
	return { ...grids, "llm-dp": "1", "tensor-parallel-num-weight-shards": String(shards) };
}

/** How gradients and optimizer state are spread over replicas. */
function drawReduction(draw: Draw, flags: Flags): Flags {
	return {
		...draw.sometimes(0.4, () => ({ "use-distributed-optimizer": on })),
		...draw.sometimes(0.4, () => ({
			"overlap-grad-reduce": on,
			...draw.one<Flags>([{}, { "ddp-num-buckets": "3" }, { "ddp-bucket-size": "500" }]),
			...draw.sometimes(0.5, () => ({ "overlap-param-gather": on })),
		})),
		...draw.sometimes(0.1, () => ({ "exp-avg-dtype": "bf16" })),
		...draw.sometimes(flags["adam-beta2"] === "0.95" ? 0.2 : 0, () => ({ "exp-avg-sq-dtype": "bf16" })),
		...draw.sometimes(0.1, () => ({ "grad-reduce-in-bf16": on })),
		...draw.sometimes(0.15, () => ({ bf16: on })),
	};
}

/** Only what verify can compare, by definition: Megatron's masks of Mamba heads depend on the tensor-parallel ranks. */
export function verifiable({ "encoder-grad-participation": _, "flextron-compat": _masks, ...flags }: Flags): Flags {
	if (!flags["moe-router-load-balancing-type"]?.includes("global_aux_loss")) return flags;
	return { ...flags, "moe-router-load-balancing-type": "none", "moe-aux-loss-coeff": "0" };
}

/** Grids that allow passes in turns, where these are asked for; else the model's without. */
export function withGrids(
	draw: Draw,
	flags: Flags,
	count: number,
): { readonly flags: Flags; readonly grids: readonly Grids[] } {
	const turned = { ...flags, ...drawTurns(draw) };
	const some = draw.chance(0.25) ? drawAllowedGrids(draw, turned, count, () => {}) : [];
	if (some.length > 0) return { flags: turned, grids: some };
	return { flags, grids: drawAllowedGrids(draw, flags, count, () => {}) };
}

/** Options that change no value, bit for bit. */
export function drawNeutral(draw: Draw, flags: Flags): Flags {
	const experts = flags["hybrid-layer-pattern"]!.includes("E");
	const options: Flags[] = [
		drawRecomputation(draw),
		{ "delay-wgrad-compute": on },
		drawTurns(draw),
		{ "overlap-grad-reduce": on, "overlap-param-gather": on, "ddp-bucket-size": draw.one(["100", "3000"]) },
		{ "use-distributed-optimizer": on },
		{ "deterministic-mode": on },
		{ "timing-log-level": "2", "timing-log-option": "all" },
		{ "log-num-zeros-in-grad": on, "log-params-norm": on, "log-throughput": on },
		{ "tensorboard-dir": "tensorboard", "log-timers-to-tensorboard": on, "mlflow-dir": "mlruns" },
		{ "wandb-save-dir": "wandb", "wandb-project": "p" },
		{ "profile-step-start": "2", "profile-step-end": "3" },
		{ "flight-recorder-dir": "flight" },
		{ "data-prefetch": "1", "data-threads": "1" },
		{ "data-routing": "routed" },
		{ "eval-interval": "2", "eval-iters": "1" },
		...(hasEncoder(flags) ? [{ "overlap-grad-reduce": on, "encoder-ddp-overlap": on }] : []),
		{ save: "neutral", "save-interval": "3", ...(draw.chance(0.5) && { "async-save": on }) },
		{ "microbatch-group-size-per-virtual-pipeline-stage": draw.one(["2", "3", "4"]) },
		{ "moe-router-fusion": on, "moe-permute-fusion": on, "cross-entropy-loss-fusion": "false" },
		...(experts ? [{ "moe-expert-capacity-bound": "64" }] : []),
		...(hasEncoder(flags) && "freeze-vit" in flags ? [{ "mimo-encoder-prefetch": on }] : []),
	];
	return Object.assign({}, draw.one(options), draw.one(options), draw.one(options));
}

/** Adds what is allowed of `more` beside `flags`; empty where nothing is. */
export function allowed(flags: Flags, more: Flags): Flags {
	return refusal({ ...flags, ...more }) === null ? more : {};
}

/** Options that change the order of sums alone. */
export function drawEquivalent(draw: Draw, flags: Flags): Flags {
	const experts = flags["hybrid-layer-pattern"]!.includes("E");
	const options: Flags[] = [
		{ threads: "2" },
		{ "mamba-chunk-size": draw.one(["2", "6", "64"]) },
		...(experts
			? [
					{ "moe-fused-mlp": "off" },
					{ "moe-fused-mlp": "on" },
					{ "moe-mlp-glu-interleave-size": draw.one(["1", "2", "4"]) },
					{ "moe-token-dispatcher-type": draw.one(["alltoall", "allgather"]) },
					{ "moe-token-dispatcher-type": "flex", "moe-hybridep-ranks-per-nvlink-domain": draw.one(["1", "2", "4"]) },
				]
			: []),
		...(hasEncoder(flags) ? [{ "encoder-balance": draw.one(["number", "cost"]) }] : []),
		...(flags["recompute-granularity"] === "full"
			? []
			: [{ "hybrid-layer-pattern": flags["hybrid-layer-pattern"]!.replaceAll(/[[\]]/g, "") }]),
	];
	return Object.assign({}, draw.one(options), draw.one(options));
}

export const plainArithmetic = (flags: Flags): Flags =>
	Object.fromEntries(
		Object.entries(flags).filter(([key]) => !/^(bf16|fp8-.*|exp-avg.*-dtype|grad-reduce-in-bf16)$/.test(key)),
	);

/** Whether a sample's loss depends on which others share its microbatch, or draws differ by microbatch. */
export function poolsMicrobatches(flags: Flags): boolean {
	const balanced = /aux_loss/.test(flags["moe-router-load-balancing-type"] ?? "");
	return (
		balanced ||
		flags["hybrid-layer-pattern"]!.includes("/") ||
		"flextron" in flags ||
		"moe-router-force-load-balancing" in flags
	);
}

export const unpooled = (flags: Flags): Flags => ({
	...flags,
	...("moe-aux-loss-coeff" in flags && { "moe-router-load-balancing-type": "none", "moe-aux-loss-coeff": "0" }),
});

/** What Hugging Face's NemotronH has, and nothing else. */
export const published: Flags = {
	"squared-relu": on,
	"moe-router-score-function": "sigmoid",
	"moe-router-enable-expert-bias": on,
};

/** What its vision-language model has. */
export const publishedVision: Flags = {
	...{ "vision-projection-type": "mlp", "vision-projection-norm": on, "pixel-shuffle": on },
	...{ "disable-vision-class-token": on, "vision-final-layernorm": "false", "vision-position-mode": "cpe" },
	...{ "vision-max-img-h": "48", "vision-max-img-w": "48", "vision-num-attention-heads": "2" },
	"dynamic-resolution": on,
};

/** Keys of images in tiles, for which its image processor has no place. */
export const tiling = /^(use-(tiling|tile-tags|thumbnail|area-weighted-aspect-ratio)|max-num-tiles)$/;

export const foreign =
	/^(vision-kv-channels|swiglu|quick-geglu|activation-func.*|glu-linear-offset|add-bias-linear|position-embedding-type|rotary-.*|moe-router-pre-softmax|moe-mlp-glu.*|moe-fused-mlp|fp8-.*)$/;

/** The flags of other grids for a model that is read from a checkpoint. */
export function onGridsOf(draw: Draw, flags: Flags): Flags {
	const grids = drawAllowedGrids(draw, plainArithmetic(flags), 1, () => {})[0]?.flags ?? {};
	// A checkpoint does not say where a pipeline is cut.
	return { ...grids, "hybrid-layer-pattern": flags["hybrid-layer-pattern"]! };
}

/** The flags on other grids with as many data lanes, and so the same samples in the same microbatches. */
export function onGridsOfLanes(draw: Draw, flags: Flags): Flags {
	const { "tensor-parallel-num-weight-shards": shards, "overlap-moe-expert-parallel-comm": _, ...own } = flags;
	const { "ep-overlap-early-attn-memory-release": __, ...plain } = own;
	const lanes = shards === undefined ? (own["llm-dp"] ?? "1") : String(Number(shards) / Number(own["llm-tp"]));
	for (let attempt = 0; attempt < 20; attempt++) {
		const [grids] = drawAllowedGrids(draw, plain, 1, () => {});
		if (grids?.flags["llm-dp"] === lanes) return { ...plain, ...grids.flags };
	}
	const encoder = hasEncoder(flags) ? { "encoder-tp": "1", "encoder-dp": "1", "llm-offset": "1" } : {};
	return { ...plain, ...encoder, "llm-tp": "1", "llm-pp": "1", "llm-ep": "1", "llm-expt-tp": "1", "llm-dp": lanes };
}
