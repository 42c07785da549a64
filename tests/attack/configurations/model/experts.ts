/** Experts: their router, their sizes, how their rows travel, and sizes that differ from layer to layer. */
import { type Draw, type Flags, on } from "../draw.ts";

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

export function drawExperts(draw: Draw, fp8: number): Flags {
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
		...draw.sometimes(fp8, () => ({
			"fp8-format": "e4m3",
			"fp8-recipe": "blockwise",
			"fp8-emulate": on,
			...draw.sometimes(0.5, () => ({ "fp8-wgrad": on })),
		})),
	};
}

/** Sizes that differ from layer to layer. */
export function drawPerLayer(draw: Draw, pattern: string, flags: Flags): Flags {
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
