/** The encoder and the placement of its rows on several processes: values and every gradient equal those of one. */
import { describe, expect, test } from "bun:test";
import { relativeRms } from "../support.ts";
import { runRanks } from "./ranks.ts";
import { type PrintedGradients, wholeGradients } from "./whole-gradients.ts";

interface RankResult extends PrintedGradients {
	readonly rows: readonly number[];
	readonly tokens: readonly number[];
}

async function encode(ranks: number, kinds: readonly string[]): Promise<RankResult[]> {
	const outcomes = await runRanks("encoder-rank.ts", ranks, kinds);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	return outcomes.map(({ stdout }) => JSON.parse(stdout) as RankResult);
}

describe("tp2 equals one process", () => {
	for (const kinds of [["affine"], ["mlp"], ["mlp", "normed"]]) {
		test(kinds.join(", "), async () => {
			const [alone] = await encode(1, kinds);
			const pair = await encode(2, kinds);
			for (const { rows } of pair) expect(relativeRms(rows, alone!.rows)).toBeLessThan(1e-6);
			const tokens = pair.flatMap((rank) => rank.tokens);
			expect(relativeRms(tokens, alone!.tokens)).toBeLessThan(1e-6);
			const [actual, expected] = [wholeGradients(pair), wholeGradients([alone!])];
			expect([...actual.keys()].sort()).toEqual([...expected.keys()].sort());
			for (const [name, gradient] of expected) {
				expect(relativeRms(actual.get(name)!, gradient), name).toBeLessThan(1e-5);
			}
			// Every rank completes the gradients of parameters that it shares with the others.
			for (const [name, { blocks }] of Object.entries(pair[1]!.blocks)) {
				if (blocks[0]!.rows * blocks[0]!.columns !== expected.get(name)!.length) continue;
				expect(relativeRms(pair[1]!.gradients[name]!, pair[0]!.gradients[name]!), name).toBeLessThan(1e-6);
			}
		}, 60_000);
	}
});
