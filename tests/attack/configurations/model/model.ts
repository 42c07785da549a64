/**
 * Tiny models with every option that a configuration has, drawn from a seed. Sizes divide one another where they mostly
 * have to; what is refused all the same is drawn again.
 */
import { type Draw, type Flags, on } from "../draw.ts";
import { drawWorkOrder } from "../layout/work-order.ts";
import { drawAdapters } from "./adapters.ts";
import { drawElastic } from "./elastic.ts";
import { drawExperts, drawPerLayer } from "./experts.ts";
import { drawActivation, drawAttention, drawMamba, drawMtp, drawPattern } from "./language.ts";
import { drawVision } from "./vision.ts";

/** How often models have a part. */
export interface Emphasis {
	readonly vision: number;
	/** Multi-token prediction. */
	readonly mtp: number;
	readonly elastic: number;
	readonly adapters: number;
	/** Sizes that differ from layer to layer. */
	readonly perLayer: number;
	/** e4m3 products of experts. */
	readonly fp8: number;
	/** Layers with experts among all. */
	readonly experts: number;
	/** Pictures as tiles. */
	readonly tiling: number;
	/** Energon data where plain text would do. */
	readonly energon: number;
}

export const usual: Emphasis = {
	...{ vision: 0.35, mtp: 0.15, elastic: 0.1, adapters: 0.1, perLayer: 0.08, fp8: 0.08, experts: 0.36 },
	...{ tiling: 0.15, energon: 0.25 },
};

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
export function drawModel(draw: Draw, emphasis: Emphasis): Flags {
	const layers = drawPattern(draw, emphasis.experts);
	const mtp = draw.chance(emphasis.mtp) ? `/${draw.one(["M", "*", "E", "*E", "-"])}` : "";
	const pattern = layers + mtp.repeat(draw.whole(1, 2));
	const vision = draw.chance(emphasis.vision);
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
		...(pattern.includes("E") && drawExperts(draw, emphasis.fp8)),
	};
	const elastic = draw.chance(emphasis.elastic);
	return {
		...sizes,
		...(mtp !== "" && drawMtp(draw)),
		...drawActivation(draw),
		...(vision && drawVision(draw)),
		...(elastic ? drawElastic(draw, sizes) : draw.sometimes(emphasis.adapters, () => drawAdapters(draw))),
		...drawOptimizer(draw),
		...drawWorkOrder(draw),
		...draw.sometimes(elastic ? 0 : emphasis.perLayer, () => drawPerLayer(draw, pattern, sizes)),
		...draw.sometimes(elastic ? 0 : 0.2, () => ({
			"add-bias-linear": on,
			"moe-shared-expert-intermediate-size": "0",
		})),
		...draw.sometimes(0.3, () => ({ "untie-embeddings-and-output-weights": "false" })),
		...draw.sometimes(0.15, () => ({ "hidden-dropout": "0.1" })),
		...draw.sometimes(0.15, () => ({ "attention-dropout": "0.1" })),
		...draw.sometimes(0.15, () => ({ "z-loss-coeff": "0.001" })),
		...draw.sometimes(0.1, () => ({ "embedding-init-method-std": "1" })),
	};
}
