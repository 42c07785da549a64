/** Multi-latent attention trains the same on every layout, with YaRN, recomputed parts, adapters of every projection, and no query latent. */
import { afterAll, expect, test } from "bun:test";
import { loraModules } from "../../../src/config/keys/lora.ts";
import { recomputeModuleNames } from "../../../src/config/recompute-modules.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const latents = {
	...{ "hybrid-layer-pattern": "+-|+E", "num-attention-heads": 4, "num-query-groups": 4, "qk-layernorm": true },
	...{ "q-lora-rank": 24, "kv-lora-rank": 16, "qk-head-dim": 6, "qk-pos-emb-head-dim": 4, "v-head-dim": 5 },
	...{ "rotary-scaling-factor": 4, "yarn-original-max-position-embeddings": 8, "mscale-all-dim": 1 },
};
const modules = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
const adapters = {
	"lora-rank": 3,
	"lora-dropout": 0.1,
	"lora-target-modules": loraModules.filter((name) => !name.startsWith("experts")),
};
for (const [layout, keys] of [
	["1+tp2", { ...latents, ...modules }],
	["1+tp2", { ...latents, ...modules, ...adapters, "hybrid-layer-pattern": "+-+-" }],
	["1+tp2", { ...latents, ...modules, "q-lora-rank": null, "qk-layernorm": false, "rope-type": "rope" }],
	["dp2|pp2", { ...latents, "rotary-interleaved": false, "attention-dropout": 0.1 }],
] as const) {
	test(`${layout} ${JSON.stringify(keys)}`, async () => {
		const { failures, result } = await run.reportOf(layout, keys);
		expect(failures).toEqual([]);
		expect(result).toMatchObject({ zero: { gradients: 0, weights: 0 } });
	}, 60_000);
}
