/** Reference runs of Megatron-LM with encoder and language model on disjoint grids of processes. */
import { afterAll, describe, expect, test } from "bun:test";
import { type ParityReport, renderReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { golden, largeGolden } from "../golden.ts";
import { testDevice } from "../support.ts";
import { runRanks } from "./ranks.ts";

const device = await testDevice(1);
afterAll(() => device[Symbol.dispose]());

const side = (tensor: number, data: number, expert = 1, pipeline = 1) => ({
	tensor,
	data,
	pipeline,
	expert,
	expertTensor: 1,
});
const full = process.env.MIMO_TEST_FULL === "1";
const steps = full ? 1000 : 3;

/** The small reference of the repository, then Megatron-LM's own where this machine has it. */
async function expectParity(name: string, encoder: ReturnType<typeof side>, language: typeof encoder, zero = false) {
	await expectAgreement(golden(`${name}-small`), encoder, language, zero);
	const large = largeGolden(name);
	if (large !== null) await expectAgreement(large, encoder, language, zero);
}

async function expectAgreement(
	folder: string,
	encoder: ReturnType<typeof side>,
	language: typeof encoder,
	zero: boolean,
) {
	const ranks = encoder.tensor * encoder.data + language.tensor * language.data * language.pipeline;
	const layout = JSON.stringify({ encoder, language, steps, zero });
	const outcomes = await runRanks("mimo-rank.ts", ranks, [folder, layout]);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const report = JSON.parse(outcomes.at(-1)!.stdout) as ParityReport;
	expect(renderReport(report)).toEndWith(`all ${report.checks.length} values agree.`);
	// Stages name their own values, each in its order.
	expect(report.checks.map(({ name }) => name).sort()).toEqual(await comparedInOneProcess(folder));
}

/** Names of the values that one process compares; both participation folders have the same. */
async function comparedInOneProcess(folder: string): Promise<string[]> {
	const { checks } = await compareAlone(device, folder.replace("corrected", "exact"), { steps });
	return checks.map(({ name }) => name).sort();
}

describe("parity on disjoint grids", () => {
	test("mimo-tp2-tp2ep2-dynamic on tp2 + tp2 pp2 ep2", () =>
		expectParity("mimo-tp2-tp2ep2-dynamic", side(2, 1), side(2, 1, 2, 2)));
	test("mimo-1x1-dynamic on tp2 + 1", () => expectParity("mimo-1x1-dynamic", side(2, 1), side(1, 1)));
	test("mimo-dp2-dp2ep2-fixed on dp2 + dp2 ep2, ZeRO-1", () =>
		expectParity("mimo-dp2-dp2ep2-fixed", side(1, 2), side(1, 2, 2), true));
	test("mimo-participation-exact on 1 + dp2 ep2 (fan-out)", () =>
		expectParity("mimo-participation-exact", side(1, 1), side(1, 2, 2)));
	if (!full) return;
	// Without --full tests/e2e/reference-layouts has these, or others of their kind.
	test("mimo-tp2-tp2ep2-dynamic on 1 + pp2", () =>
		expectParity("mimo-tp2-tp2ep2-dynamic", side(1, 1), side(1, 1, 1, 2)));
	test("mimo-1x1-fixed on 1 + 1", () => expectParity("mimo-1x1-fixed", side(1, 1), side(1, 1)));
	test("mimo-tp2-tp2ep2-dynamic on tp2 + tp2 ep2", () =>
		expectParity("mimo-tp2-tp2ep2-dynamic", side(2, 1), side(2, 1, 2)));
	test("mimo-participation-exact on 4 + 2 (fan-in)", () =>
		expectParity("mimo-participation-exact", side(1, 4), side(1, 2)));
	test("mimo-participation-corrected on dp2 + dp2 ep2", () =>
		expectParity("mimo-participation-corrected", side(1, 2), side(1, 2, 2)));
	test("mimo-dp2-dp2ep2-fixed on tp2 dp2 + tp2 dp2 ep2", () =>
		expectParity("mimo-dp2-dp2ep2-fixed", side(2, 2), side(2, 2, 2)));
});
