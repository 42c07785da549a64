/** Low-rank adapters. */
import type { Draw, Flags } from "../draw.ts";

const projections = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"];

export function drawAdapters(draw: Draw): Flags {
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
