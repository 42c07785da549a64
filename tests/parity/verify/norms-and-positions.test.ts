/** LayerNorm and learned positions train the same on every layout. */
import { afterAll, expect, test } from "bun:test";
import { recomputeModuleNames } from "../../../src/config/recompute-modules.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const layerNorm = { normalization: "LayerNorm" };
const learned = { ...layerNorm, "position-embedding-type": "learned_absolute" };
const recomputed = { "recompute-granularity": "full", "recompute-num-layers": 2 };
const modules = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
const quick = [
	["1+tp2", { ...learned, ...modules }],
	["dp2|pp2", { ...learned, "hybrid-layer-pattern": "ME|*-", "untie-embeddings-and-output-weights": false }],
	["1+pp2", { ...layerNorm, "hybrid-layer-pattern": "ME|*-/M" }],
] as const;
const all = [
	["tp2+pp2tp2ep2", { ...learned, "hybrid-layer-pattern": "ME|*-" }],
	["dp4|pp2tp2", { ...learned, ...recomputed, "hybrid-layer-pattern": "ME|*-", "delay-wgrad-compute": true }],
	["tp2|ep2dp2", learned],
] as const;
for (const [layout, keys] of process.env.MIMO_TEST_FULL === "1" ? [...quick, ...all] : quick) {
	test(`${layout} ${JSON.stringify(keys)}`, async () => {
		const { failures, result } = await run.reportOf(layout, keys);
		expect(failures).toEqual([]);
		expect(result).toMatchObject({ zero: { gradients: 0, weights: 0 } });
	}, 60_000);
}
