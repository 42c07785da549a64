import { describe, expect, test } from "bun:test";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { golden, largeGolden } from "../../golden.ts";

/** Pipelines behind the encoder, and modules that share two and four ranks. */
export const staged = ["1+pp2", "tp2+pp2", "dp2|pp2", "dp4|tp2dp2ep2"];

/**
 * Defines tests of `dist/mimo parity`: a reference, and Megatron-LM's own run that it is the small relative of, agree on
 * layouts, as processes. null is the folder's own layout, which no flag names. Of Megatron-LM's run only that one, unless
 * MIMO_TEST_FULL=1 (`npm run test:layouts`).
 */
export function agreesOnProcesses(name: string, layouts: readonly (string | null)[]): void {
	describe(`${name} agrees on processes`, () => {
		for (const layout of layouts) {
			test(`${layout ?? "its own layout"}, small`, () => expectAgreement(golden(`${name}-small`), layout), 120_000);
		}
		for (const layout of process.env.MIMO_TEST_FULL === "1" ? layouts : [null]) {
			test(`${layout ?? "its own layout"}, Megatron-LM's`, () => {
				const folder = largeGolden(name);
				if (folder !== null) expectAgreement(folder, layout);
			}, 300_000);
		}
	});
}

export function expectAgreement(folder: string, layout: string | null): void {
	const { exitCode, stdout, stderr } = mimo([
		...["parity", "--golden", folder, ...deviceFlags.split(" ")],
		...(layout === null ? [] : ["--layout", layout]),
	]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toMatch(/: all \d{3} values agree\.\n$/);
}
