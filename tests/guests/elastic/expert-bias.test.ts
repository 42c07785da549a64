/** The expert bias of an elastic parent: experts that masks leave out are not starved (docs/spec/elastic.md §10). */
import { describe, expect, test } from "bun:test";
import { TableLayout } from "../../../src/guests/elastic/masks/tables.ts";
import type { AxisSample } from "../../../src/guests/elastic/router/network.ts";
import { RouterState } from "../../../src/models/language/router-state.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { testDevice } from "../../support.ts";
import { tiny } from "../../train/training.ts";
import { familyOf, softMasks } from "./family-model.ts";

/** The bias after a step with these tokens, and for each microbatch the shares of balanced tokens and the choices made. */
async function biasAfter(
	counts: readonly number[],
	microbatches: readonly [shares: readonly number[], choices: number][],
) {
	using device = await testDevice();
	const { moe } = tiny({ "hybrid-layer-pattern": "E", "num-experts": 4, "moe-router-bias-update-rate": 0.5 });
	using router = new RouterState(device, moe, { tokenShards: 1, passes: 1 });
	device.setZero(router.expertBias, router.expertBias.bytes);
	device.copyToDevice(router.tokensPerExpert, Int32Array.from(counts));
	for (const [shares, choices] of microbatches) router.expect(Float64Array.from(shares), choices);
	router.finishStep(groupOfOne("language", 0));
	expect([...router.tokensPerExpert.toInt32()]).toEqual([0, 0, 0, 0]);
	expect([...router.stepTokens.toInt32()]).toEqual([...counts]);
	return [...router.expertBias.toFloat32()];
}

const all = [0.25, 0.25, 0.25, 0.25];
const half = [0.5, 0.5, 0, 0];

describe("the bias moves", () => {
	test("by the mean where no mask leaves an expert out", async () => {
		const plain = await biasAfter([9, 8, 7, 8], []);
		expect(plain).toEqual([-0.5, 0, 0.5, 0]);
		expect(
			await biasAfter(
				[9, 8, 7, 8],
				[
					[all, 20],
					[all, 12],
				],
			),
		).toEqual(plain);
	});

	test("not for experts that were left out, and among the others by what they could get", async () => {
		expect(await biasAfter([20, 12, 0, 0], [[half, 32]])).toEqual([-0.5, 0.5, 0, 0]);
		// 4 + 8 for each of the first two, 4 for the others.
		expect(
			await biasAfter(
				[12, 12, 3, 5],
				[
					[all, 16],
					[half, 16],
				],
			),
		).toEqual([0, 0, 0.5, -0.5]);
	});
});

test("shares of balanced tokens are proportional to the factors of the experts", () => {
	const sharesOf = (keys: Readonly<Record<string, unknown>>, probabilities: readonly number[], chosen: number) => {
		const { elastic, model } = familyOf(keys);
		const axis = elastic.axes.find(({ name }) => name === "moe_expert")!;
		expect(axis.sizes).toEqual([6, 5, 3, 2]);
		const one = { axis, probabilities: Float64Array.from(probabilities), chosen: [chosen] } as unknown as AxisSample;
		return [...new TableLayout(elastic, model).expertShares(new Map([["moe_expert", one]]), 0)];
	};
	expect(sharesOf({}, [0, 0, 1, 0], 2)).toEqual([1 / 3, 1 / 3, 1 / 3, 0, 0, 0]);
	// Factors 1, 1, 0.5, 0.25, 0.25, 0, whose sum is 3.
	expect(sharesOf(softMasks, [0, 0.25, 0.25, 0.5], 3)).toEqual([1, 1, 0.5, 0.25, 0.25, 0].map((factor) => factor / 3));
});
