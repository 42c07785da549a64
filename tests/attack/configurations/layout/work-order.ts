/** The order of the work of a step. */
import { type Draw, type Flags, on } from "../draw.ts";

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
