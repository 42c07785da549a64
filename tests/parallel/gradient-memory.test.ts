/** The memory of a gradient is not read before this step has written it: NaN there changes no bit of any rank. */
import { expect, test } from "bun:test";
import { runRanks } from "./ranks.ts";

for (const [layout, ranks, changes] of [
	["1", 1, {}],
	["1", 1, { "freeze-vit": true }],
	["1+tp2", 3, {}],
	["2+dp2ep2", 4, {}],
] as const) {
	test(`${layout}${Object.keys(changes).length > 0 ? `, ${JSON.stringify(changes)}` : ""}`, async () => {
		const outcomes = await runRanks("gradient-memory-rank.ts", ranks, [layout, JSON.stringify(changes)]);
		for (const { exitCode, stderr, stdout } of outcomes) {
			expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
			const { different, elements, plain, poisoned } = JSON.parse(stdout);
			expect(elements).toBeGreaterThan(1000);
			expect(different).toBe(0);
			expect(poisoned).toEqual(plain);
			expect(plain[0].gradientNorm).toBeGreaterThan(0.1);
			expect(plain[1].updated).toBeTrue();
		}
	}, 60_000);
}
