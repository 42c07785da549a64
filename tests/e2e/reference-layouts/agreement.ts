import { describe, expect, test } from "bun:test";
import { deviceFlags, mimo } from "../../commands/mimo.ts";
import { golden, largeGolden } from "../../golden.ts";

const full = process.env.MIMO_TEST_FULL === "1";

/**
 * Defines tests of `dist/mimo parity`: a reference, and Megatron-LM's own run that it is the small relative of, agree on
 * layouts, as processes. null is the folder's own layout, which no flag names. Only the small one, on it and on those in `quick`,
 * unless MIMO_TEST_FULL=1 (`npm run test:layouts`).
 */
export function agreesOnProcesses(
	name: string,
	{ quick, more }: { readonly quick: readonly string[]; readonly more: readonly string[] },
): void {
	const layouts = [null, ...quick, ...(full ? more : [])];
	describe(`${name} agrees on processes`, () => {
		for (const layout of layouts) {
			test(`${layout ?? "its own layout"}, small`, () => expectAgreement(golden(`${name}-small`), layout), 120_000);
		}
		for (const layout of full ? layouts : []) {
			test(`${layout ?? "its own layout"}, Megatron-LM's`, () => {
				const folder = largeGolden(name);
				if (folder !== null) expectAgreement(folder, layout);
			}, 300_000);
		}
	});
}

export function expectAgreement(folder: string, layout: string | null, flags: readonly string[] = []): void {
	const { exitCode, stdout, stderr } = mimo([
		...["parity", "--golden", folder, ...deviceFlags.split(" "), ...flags],
		...(layout === null ? [] : ["--layout", layout]),
	]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout).toMatch(/: all \d{2,3} values agree\.\n$/);
}
