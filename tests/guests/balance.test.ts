/** Encoder lanes that share images by cost train as lanes that encode what they have read. */
import { describe, expect, test } from "bun:test";
import { resolve } from "node:path";
import { runRanks } from "../parallel/ranks.ts";

const program = resolve(import.meta.dir, "balance-rank.ts");

async function compare(layout: string, ranks: number, flags: Record<string, unknown> = {}) {
	const outcomes = await runRanks(program, ranks, [layout, JSON.stringify(flags)]);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const found = outcomes.map(({ stdout }) => JSON.parse(stdout) as Record<string, number>);
	for (const { loss, gradient, compared, left } of found) {
		expect(loss).toBeLessThan(1e-5);
		expect(gradient).toBeLessThan(1e-5);
		expect(compared).toBeGreaterThan(0);
		expect(left).toBe(0);
	}
	expect(found.some(({ moved }) => moved! > 0)).toBe(true);
	expect(found.every(({ movedByNumber }) => movedByNumber === 0)).toBe(true);
}

describe("images shared by cost", () => {
	test("on ranks of their own, encoder lanes sharing a language lane", () => compare("dp2+1", 3));
	test("with tensor-parallel lanes", () => compare("tp2dp2|tp2dp2", 4));
	test("on the stages of a pipeline", () => compare("dp2|pp2", 2));
	test("with a frozen tower", () => compare("dp2|dp2", 2, { "freeze-vit": true }));
});
