/** A run's JSON log against golden values of Megatron's functional tests, or against a TensorBoard event folder. */

import { statSync } from "node:fs";
import * as v from "valibot";
import { LARGEST_LOG_LINE } from "../observe/run-log/entry.ts";
import { readScalars } from "../observe/tensorboard.ts";
import { UserError } from "../system/errors.ts";
import { linesOf } from "../system/input-file.ts";
import { indexLimits, readJsonText } from "../system/json.ts";
import { type Check, type ParityReport, relative } from "./comparison.ts";

/** Values by metric and step. */
type Series = ReadonlyMap<string, ReadonlyMap<number, number>>;

const goldenValuesSchema = v.record(
	v.string(),
	v.object({
		start_step: v.number(),
		end_step: v.number(),
		step_interval: v.number(),
		values: v.record(v.string(), v.union([v.number(), v.literal("nan")])),
	}),
);

/** Names in a run's log of metrics of golden values and of TensorBoard tags, where they differ. */
const logNames: Readonly<Record<string, string>> = { "grad-norm": "grad_norm", "num-zeros": "num_zeros" };
/** Speed is not compared. */
const timings = /time|throughput|mem-|learning-rate|vs samples/;

/**
 * Compares every metric and step that both sides have, within a relative `tolerance` (Megatron's own functional tests
 * allow 5 %).
 */
export function logParity(golden: string, log: string, tolerance: number): ParityReport {
	const expected = statSync(golden).isDirectory() ? readScalars(golden) : readGoldenValues(golden);
	const actual = readLog(log);
	const checks: Check[] = [];
	for (const [metric, wanted] of expected) {
		if (timings.test(metric)) continue;
		const found = actual.get(logNames[metric] ?? metric);
		if (!found) continue;
		for (const [step, value] of wanted) {
			const mine = found.get(step);
			if (mine === undefined) continue;
			const error = relative(mine, value);
			checks.push({ name: `step ${step} ${metric}`, expected: value, actual: mine, error, limit: tolerance });
		}
	}
	if (checks.length === 0) throw new UserError(`${golden} and ${log} have no metric and step in common.`);
	return { folder: golden, checks };
}

function readGoldenValues(path: string): Series {
	const text = readJsonText(path, indexLimits);
	let json: unknown;
	try {
		json = JSON.parse(text);
	} catch (error) {
		throw new UserError(`${path} is no JSON: ${(error as Error).message}.`);
	}
	const result = v.safeParse(goldenValuesSchema, json);
	if (!result.success) {
		const issue = result.issues[0];
		throw new UserError(`${path} holds no golden values: ${v.getDotPath(issue) ?? "the file"}: ${issue.message}.`);
	}
	return new Map(
		Object.entries(result.output).map(([metric, { values }]) => [
			metric,
			new Map(Object.entries(values).map(([step, value]) => [Number(step), Number(value)])),
		]),
	);
}

function readLog(path: string): Series {
	const series = new Map<string, Map<number, number>>();
	for (const { number, bytes } of linesOf(path, { limit: LARGEST_LOG_LINE, unended: true })) {
		const line = bytes.toString("utf8");
		if (line.trim() === "") continue;
		let entry: Record<string, unknown>;
		try {
			entry = JSON.parse(line);
		} catch {
			throw new UserError(`Line ${number} of ${path} is no JSON.`);
		}
		const { iteration } = entry;
		if (typeof iteration !== "number" || "split" in entry) continue;
		for (const [name, value] of Object.entries(entry)) {
			const number = typeof value === "string" && value === "NaN" ? Number.NaN : value;
			if (typeof number !== "number") continue;
			if (!series.has(name)) series.set(name, new Map());
			series.get(name)!.set(iteration, number);
		}
	}
	return series;
}
