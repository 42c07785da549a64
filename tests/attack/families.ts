/**
 * Draws small models of every family, which transformers writes and differentiates in float64 (tests/reference/drawn_families.py and
 * drawn_pictures.py), and compares one step with each: layers, logits, losses and the gradient of every tensor. Each also goes through a
 * checkpoint and comes back byte for byte.
 *
 *   bun tests/attack/families.ts [--full | --count 5] [--seed 1] [--first 0] [--families llama,qwen3] [--layouts] [--keep FOLDER]
 *
 * --full: 100 of a family. --layouts: each on a layout of ranks too, drawn among those that divide, by dist/mimo. --keep: the folder in
 * which those that differ stay; `mimo parity --golden` shows one of them again. Exits with 1 when one differs.
 */
import { mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { planConversion } from "../../src/checkpoint/conversion/convert.ts";
import type { Device } from "../../src/native/device.ts";
import { type Check, firstFailure, type ParityReport } from "../../src/parity/comparison.ts";
import { compareAlone } from "../../src/parity/formats.ts";
import { UserError } from "../../src/system/errors.ts";
import { conversionOptions } from "../checkpoint/conversion/options.ts";
import { mimo } from "../commands/mimo.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { testDevice } from "../support.ts";

/** model_type of every family: of language models, and of vision-language models. */
export const drawnFamilies = [
	...["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"],
	...["gpt_oss", "deepseek_v3", "glm4_moe", "gemma3_text", "nemotron_h"],
];
export const drawnPictures = [
	...[
		"qwen2_5_vl",
		"qwen3_vl",
		"qwen3_vl_moe",
		"qwen3_5",
		"qwen3_5_moe",
		"glm4v_moe",
		"internvl",
		"llava",
		"llava_onevision",
	],
	"nemotron_h_omni",
];
const languageLayouts = ["tp2", "pp2", "dp2", "dp2ep2", "tp2pp2", "cp2", "tp2cp2", "dp2pp2"];
const pictureLayouts = ["1|1", "tp2|tp2", "1+pp2", "dp2|dp2", "1+tp2", "tp2+1", "1+cp2", "pp2+1"];

export interface Drawn {
	/** Family, seed and number. */
	readonly name: string;
	readonly state: "ok" | "refused" | "WRONG";
	/** What differs first, or why the model is refused. */
	readonly said: string;
}

export interface DrawOptions {
	readonly families: readonly string[];
	readonly count: number;
	readonly seed: number;
	readonly first: number;
	readonly onLayouts: boolean;
	/** Where folders that differ stay; null: nowhere. */
	readonly keep: string | null;
}

/** Draws models, a family at a time, and compares them. */
export async function* meetFamilies(python: string, options: DrawOptions): AsyncGenerator<Drawn> {
	const { families, count, seed, first, onLayouts, keep } = options;
	const place = mkdtempSync(join(tmpdir(), "mimo-drawn-"));
	using device = await testDevice();
	try {
		for (const family of families) {
			const [script, layouts] = drawnPictures.includes(family)
				? (["drawn_pictures.py", pictureLayouts] as const)
				: (["drawn_families.py", languageLayouts] as const);
			const path = join(import.meta.dir, "../reference", script);
			const said = await runPython(python, [path, place, family, ...[seed, first, count].map(String)]);
			for (const line of said.trim().split("\n")) {
				const [name = "", noise] = line.split(" ");
				const folder = join(place, name);
				const number = Number(name.split("-").at(-1));
				const outcome = await compared(device, folder, onLayouts ? layouts[number % layouts.length]! : null);
				if (keep !== null && outcome.state === "WRONG") {
					mkdirSync(keep, { recursive: true });
					renameSync(folder, join(keep, name));
				}
				rmSync(folder, { recursive: true, force: true });
				yield { name, ...outcome, said: outcome.said && `${outcome.said} (float32 in transformers: ${noise})` };
			}
		}
	} finally {
		rmSync(place, { recursive: true, force: true });
	}
}

async function compared(device: Device, folder: string, layout: string | null): Promise<Omit<Drawn, "name">> {
	try {
		const failure = failureIn(await compareAlone(device, folder));
		if (failure !== undefined) return { state: "WRONG", said: describe(failure) };
		const changed = await changedOnTheWay(folder);
		if (changed.length > 0) return { state: "WRONG", said: `${changed.join(" and ")} came back otherwise` };
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return { state: "refused", said: error.message };
	}
	if (layout === null) return { state: "ok", said: "" };
	const { exitCode, stdout, stderr } = mimo([
		...["parity", "--golden", folder, "--device", "cpu", "--layout", layout, "--json"],
	]);
	// A layout that does not divide the model is refused as a wrong flag is.
	if (exitCode === 2) return { state: "ok", said: "" };
	const failure = stdout === "" ? null : failureIn(JSON.parse(stdout));
	if (stdout !== "" && failure === undefined) return { state: "ok", said: "" };
	return { state: "WRONG", said: `${layout}: ${failure ? describe(failure) : stderr.trim()}` };
}

/** Files that a folder has otherwise when it went through a checkpoint. */
async function changedOnTheWay(folder: string): Promise<string[]> {
	const [native, back] = [`${folder}-native`, `${folder}-back`];
	try {
		for (const [from, to, source, target] of [
			["hf", "native", folder, native],
			["native", "hf", native, back],
		] as const) {
			using plan = planConversion(conversionOptions({ from, to, source, target, optimizer: false }));
			await plan.run(() => {});
		}
		const same = (file: string) => readFileSync(join(back, file)).equals(readFileSync(join(folder, file)));
		return ["config.json", "model.safetensors"].filter((file) => !same(file));
	} finally {
		for (const made of [native, back]) rmSync(made, { recursive: true, force: true });
	}
}

/** Where a gradient is zero, rounding is what is left: relative to nothing, so it is held to the model's. */
function failureIn(report: ParityReport): Check | undefined {
	const whole = report.checks.find(({ name }) => name === "step 1 gradient norm")!.expected;
	const rounding = ({ expected, actual }: Check) => expected === 0 && Math.abs(actual) < 1e-6 * whole;
	return firstFailure({ ...report, checks: report.checks.filter((check) => !rounding(check)) });
}

function describe({ name, actual, expected, error }: Check): string {
	return `${name}: ${actual} instead of ${expected}, off by ${error.toExponential(1)}`;
}

if (import.meta.main) {
	const { values } = parseArgs({
		options: {
			full: { type: "boolean", default: false },
			count: { type: "string", default: "5" },
			seed: { type: "string", default: "1" },
			first: { type: "string", default: "0" },
			families: { type: "string", default: [...drawnFamilies, ...drawnPictures].join(",") },
			layouts: { type: "boolean", default: false },
			keep: { type: "string" },
		},
	});
	const python = referencePython("torch", "transformers");
	if (python === null) process.exit(2);
	const outcomes: Drawn[] = [];
	for await (const outcome of meetFamilies(python, {
		...{ families: values.families.split(","), count: values.full ? 100 : Number(values.count) },
		...{ seed: Number(values.seed), first: Number(values.first) },
		...{ onLayouts: values.layouts, keep: values.keep ?? null },
	})) {
		outcomes.push(outcome);
		if (outcome.state !== "ok") console.log(`${outcome.state} ${outcome.name}: ${outcome.said}`);
	}
	for (const [family, all] of Map.groupBy(outcomes, ({ name }) => name.split("-")[0]!)) {
		const states = Map.groupBy(all, ({ state }) => state);
		console.log(`${family}: ${[...states].map(([state, some]) => `${some.length} ${state}`).join(", ")}`);
	}
	process.exit(outcomes.some(({ state }) => state === "WRONG") ? 1 : 0);
}
