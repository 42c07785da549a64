/** Checkpoints of a language model: bitwise on the same layout, the same training on any other. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { NativeCheckpoint } from "../../../src/checkpoint/native/reader.ts";
import { bytesOfType } from "../../../src/checkpoint/store.ts";
import { runRanks } from "../../parallel/ranks.ts";
import type { LanguageRankOptions } from "./language-rank.ts";

interface Layout {
	readonly ranks: number;
	readonly keys: Readonly<Record<string, unknown>>;
}

const layouts = {
	one: { ranks: 1, keys: {} },
	"dp2, ZeRO-1": { ranks: 2, keys: { "llm-dp": 2, "use-distributed-optimizer": true } },
	"dp2 ep2": { ranks: 2, keys: { "llm-dp": 2, "llm-ep": 2 } },
	"tp2 dp2 ep2, ZeRO-1": {
		ranks: 4,
		keys: { "llm-tp": 2, "llm-dp": 2, "llm-ep": 2, "use-distributed-optimizer": true },
	},
	"pp2, four segments, ZeRO-1": {
		ranks: 2,
		keys: { "llm-pp": 2, "hybrid-layer-pattern": "ME|*-|MEM|", "use-distributed-optimizer": true },
	},
	"tp2 pp2": { ranks: 4, keys: { "llm-tp": 2, "llm-pp": 2, "hybrid-layer-pattern": "ME*-|MEM" } },
	"tp2, etp2": { ranks: 2, keys: { "llm-tp": 2, "llm-expt-tp": 2 } },
	"one, bf16": { ranks: 1, keys: { bf16: true } },
	"dp2, bf16, ZeRO-1": { ranks: 2, keys: { "llm-dp": 2, bf16: true, "use-distributed-optimizer": true } },
} satisfies Record<string, Layout>;
type LayoutName = keyof typeof layouts;

interface Outcome {
	readonly losses: readonly { readonly loss: number; readonly gradientNorm: number }[];
	/** Digest of every rank. */
	readonly states: readonly string[];
}

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-training-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

async function run(name: LayoutName, options: Partial<LanguageRankOptions>): Promise<Outcome> {
	const layout: Layout = layouts[name];
	const defaults = { load: null, optimizer: true, save: null, first: 0, last: 4, saveAfter: 2 };
	const program = join(import.meta.dir, "language-rank.ts");
	const all = JSON.stringify({ ...defaults, ...options, keys: layout.keys });
	const outcomes = await runRanks(program, layout.ranks, [all]);
	for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const reports = outcomes.map(({ stdout }) => JSON.parse(stdout));
	return { losses: reports[0].losses, states: reports.map(({ state }) => state) };
}

/** The uninterrupted run of a layout, which leaves a checkpoint of step 2 behind, written while steps 3 and 4 ran. */
const whole = new Map<LayoutName, Promise<Outcome>>();
const rootOf = (name: LayoutName) => join(folder, name.replaceAll(/\W/g, "-"));
function uninterrupted(name: LayoutName): Promise<Outcome> {
	if (!whole.has(name)) whole.set(name, run(name, { save: rootOf(name) }));
	return whole.get(name)!;
}

describe("resume on the same layout is bitwise the uninterrupted run", () => {
	for (const name of Object.keys(layouts) as LayoutName[]) {
		test(name, async () => {
			const full = await uninterrupted(name);
			const resumed = await run(name, { load: rootOf(name), first: 2 });
			expect(resumed.losses).toEqual(full.losses.slice(2));
			expect(resumed.states).toEqual(full.states);
		}, 60_000);
	}
});

describe("every byte is written once, whatever the layout", () => {
	for (const name of ["dp2, ZeRO-1", "dp2 ep2", "tp2 dp2 ep2, ZeRO-1", "tp2, etp2"] as const) {
		test(name, async () => {
			await Promise.all([uninterrupted(name), uninterrupted("one")]);
			using checkpoint = NativeCheckpoint.open(rootOf(name));
			using reference = NativeCheckpoint.open(rootOf("one"));
			checkpoint.verify();
			const types = (one: NativeCheckpoint) =>
				Object.fromEntries([...one.tensors].map(([tensor, { dtype, shape }]) => [tensor, `${dtype} ${shape}`]));
			expect(types(checkpoint)).toEqual(types(reference));
			const files = readdirSync(join(checkpoint.path, "data"));
			expect(files.length).toBe(layouts[name].ranks);
			const bytes = [...checkpoint.tensors.values()].reduce((sum, type) => sum + bytesOfType(type), 0);
			const stored = Object.values(checkpoint.manifest.files).reduce((sum, file) => sum + file.bytes, 0);
			// The rest are headers.
			expect(stored).toBeGreaterThanOrEqual(bytes);
			expect(stored).toBeLessThan(bytes + layouts[name].ranks * 200_000);
		}, 60_000);
	}
});

describe("resume on another layout is the same training", () => {
	const pairs: readonly (readonly [LayoutName, LayoutName])[] = [
		["one", "tp2 dp2 ep2, ZeRO-1"],
		["tp2 dp2 ep2, ZeRO-1", "one"],
		["tp2 dp2 ep2, ZeRO-1", "dp2 ep2"],
		["dp2 ep2", "tp2, etp2"],
		["tp2, etp2", "dp2, ZeRO-1"],
		["dp2, bf16, ZeRO-1", "one, bf16"],
	];
	for (const [from, to] of pairs) {
		test(`${from} → ${to}`, async () => {
			const full = await uninterrupted(from);
			const resumed = await run(to, { load: rootOf(from), first: 2 });
			for (const [step, { loss, gradientNorm }] of resumed.losses.entries()) {
				const there = full.losses[step + 2]!;
				const tolerance = from.includes("bf16") ? 2e-3 : 2e-6;
				expect(Math.abs(loss / there.loss - 1)).toBeLessThan(tolerance);
				expect(Math.abs(gradientNorm / there.gradientNorm - 1)).toBeLessThan(10 * tolerance);
			}
		}, 60_000);
	}

	test("a bf16 training goes on in fp32 from its masters", async () => {
		const full = await uninterrupted("dp2, bf16, ZeRO-1");
		const resumed = await run("one", { load: rootOf("dp2, bf16, ZeRO-1"), first: 2 });
		expect(Math.abs(resumed.losses[0]!.loss / full.losses[2]!.loss - 1)).toBeLessThan(5e-3);
	}, 60_000);
});

test("weights alone, without the optimizer", async () => {
	const full = await uninterrupted("one");
	const resumed = await run("dp2, ZeRO-1", { load: rootOf("one"), first: 2, optimizer: false });
	expect(Math.abs(resumed.losses[0]!.loss / full.losses[2]!.loss - 1)).toBeLessThan(2e-6);
	expect(resumed.losses[1]!.loss).not.toBeCloseTo(full.losses[3]!.loss, 5);
}, 60_000);
