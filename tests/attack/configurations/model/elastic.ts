/** Elastic parents: sizes to choose from, budgets, masks, and what their submodels learn from. */
import { type Draw, type Flags, on } from "../draw.ts";

/** Two or three sizes of an axis whose layers the pattern has, the parent's first, as numbers or shares. */
function drawSizes(draw: Draw, flags: Flags): Flags {
	const axes = [
		["emb", "", "hidden-size", 8],
		["mamba", "M", "mamba-num-heads", Number(flags["mamba-num-groups"])],
		["mlp", "E", "moe-ffn-hidden-size", 4],
		["moe-expert", "E", "num-experts", Number(flags["moe-router-topk"])],
		["head", "*", "num-attention-heads", Number(flags["num-query-groups"])],
	] as const;
	const lists = axes.flatMap(([axis, symbol, key, least]): (readonly [string, string])[] => {
		const parent = Number(flags[key]);
		if (!flags["hybrid-layer-pattern"]!.includes(symbol) || !(parent > least) || draw.chance(0.25)) return [];
		if (axis === "moe-expert" && "moe-router-num-groups" in flags) return [];
		if (axis === "emb" && draw.chance(0.3)) return [["emb-per-list", draw.one(["1,0.5", "1,0.75,0.5"])]];
		const between = Math.floor((parent + least) / 2 / least) * least;
		const sizes = draw.chance(0.5) ? [parent, between, least] : [parent, least];
		return [[`${axis}-int-list`, [...new Set(sizes)].join(",")]];
	});
	return Object.fromEntries(lists);
}

function drawBudgets(draw: Draw): Flags {
	const budgets = draw.one(["1", "1,0.95", "0.95", "1,0.8", "1,0.9,0.7"]);
	return {
		"budget-list": budgets,
		...draw.sometimes(0.2, () => ({
			"budget-probs": budgets
				.split(",")
				.map(() => draw.one(["1", "3"]))
				.join(","),
		})),
		...draw.sometimes(0.2, () => ({ "param-budget-target": draw.one(["active", "total"]) })),
		"original-model-sample-prob": draw.one(["0", "0.33", "1"]),
		"loss-alpha": draw.one(["0", "1"]),
	};
}

export function drawElastic(draw: Draw, flags: Flags): Flags {
	const hetero = ["mamba", "ffn", "moe-expert", "head"].filter(() => draw.chance(0.3));
	const soft = draw.chance(0.4);
	return {
		flextron: on,
		"enable-router": on,
		"router-inter-dim": "8",
		...drawBudgets(draw),
		...drawSizes(draw, flags),
		...Object.fromEntries(hetero.map((axis) => [`flex-hetero-${axis}`, on])),
		...("moe-router-bias-update-rate" in flags && { "moe-router-bias-update-rate": "0" }),
		...(soft && {
			"soft-mask": on,
			"moe-router-score-function": "sigmoid",
			"moe-router-load-balancing-type": "none",
			"moe-aux-loss-coeff": "0",
			"moe-z-loss-coeff": "0",
		}),
		...draw.sometimes(0.3, () => ({ "add-skipping": on, "layer-ranking-list": draw.one(["0", "1", "1,0"]) })),
		...draw.sometimes(0.2, () => ({ "normalize-router-logits": on })),
		...draw.sometimes(0.2, () => draw.one<Flags>([{ "freeze-router": on }, { "freeze-model": on }])),
		...draw.sometimes(0.2, () => ({ "lr-mult-router": "10", "tau-decay": "0.9", "hard-sample-th": "0.5" })),
		...draw.sometimes(0.3, () => ({
			"self-distillation": on,
			"export-kd-alpha": draw.one(["1", "0.5"]),
			"export-kd-temperature": draw.one(["1", "2"]),
		})),
		...draw.sometimes(0.1, () => ({ "flextron-compat": on })),
	};
}
