/** A run's log against golden values of Megatron's functional tests, a bf16 reference's curve, or TensorBoard events. */

import { existsSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { parse } from "yaml";
import { LARGEST_LOG_LINE } from "../observe/run-log/entry.ts";
import { readScalars } from "../observe/tensorboard.ts";
import { UserError } from "../system/errors.ts";
import { linesOf, readWholeText } from "../system/input-file.ts";
import { indexLimits, readJsonText } from "../system/json.ts";
import { bf16Report, type Check, type ParityReport, relative } from "./comparison.ts";

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

/** Relative tolerances of Megatron's functional tests (test_pretraining_regular_pipeline.py); metrics of speed have none here. */
const testTolerances: Readonly<Record<string, number>> = {
	"lm loss": 0.05,
	"total loss": 0.05,
	"mtp_1 loss": 0.05,
	"mtp_2 loss": 0.05,
	"num-zeros": 0.2,
};

/** Bytes of the largest file of a functional test that is read. */
const LARGEST_TEST_FILE = 2 ** 20;

/** The golden values of a folder without weights, which a run in bf16 has left; null: it is no such folder. */
export function curveOf(golden: string): string | null {
	const values = join(golden, "golden_values.json");
	if (!existsSync(values) || existsSync(join(golden, "config.json"))) return null;
	return readdirSync(golden).some((name) => name.includes("tfevents")) ? null : values;
}

/**
 * Compares a log, of JSON lines or a folder of TensorBoard events, with golden values: every metric and step that both have within
 * a relative `tolerance`; the metrics of a functional test's file `test` as that test does; a curve by its losses alone.
 */
export function logParity(
	golden: string,
	log: string,
	{ tolerance, test }: { readonly tolerance: number; readonly test: string | null },
): ParityReport {
	const curve = curveOf(golden);
	const expected =
		curve === null && statSync(golden).isDirectory() ? readScalars(golden) : readGoldenValues(curve ?? golden);
	const actual = statSync(log).isDirectory() ? readScalars(log) : readLog(log);
	const found = (metric: string) => actual.get(metric) ?? actual.get(logNames[metric] ?? metric);
	if (test !== null) return { folder: golden, checks: testChecks(golden, log, expected, found, testedMetrics(test)) };
	const checks: Check[] = [];
	for (const [metric, wanted] of expected) {
		if (timings.test(metric) || (curve !== null && metric !== "lm loss")) continue;
		for (const [step, value] of wanted) {
			const mine = found(metric)?.get(step);
			if (mine === undefined) continue;
			const name = `step ${step} ${curve === null ? metric : "loss"}`;
			checks.push({ name, expected: value, actual: mine, error: relative(mine, value), limit: tolerance });
		}
	}
	if (checks.length === 0) throw new UserError(`${golden} and ${log} have no metric and step in common.`);
	return curve === null ? { folder: golden, checks } : bf16Report({ folder: golden, checks });
}

/** The metrics that a functional test compares: METRICS of its file, or the test's default. */
function testedMetrics(path: string): string[] {
	let file: unknown;
	try {
		file = parse(readWholeText(path, LARGEST_TEST_FILE));
	} catch (error) {
		throw new UserError(`${path} is no YAML file: ${(error as Error).message.split("\n")[0]}.`);
	}
	if (typeof file !== "object" || file === null || !("MODEL_ARGS" in file)) {
		throw new UserError(`${path} is no functional test of Megatron: it has no MODEL_ARGS.`);
	}
	const { METRICS: metrics = ["lm loss", "num-zeros"] } = file as { METRICS?: unknown };
	const names = [metrics].flat().filter((metric): metric is string => Object.hasOwn(testTolerances, String(metric)));
	if (names.length === 0)
		throw new UserError(`${path}: METRICS has none of ${Object.keys(testTolerances).join(", ")}; others are of speed.`);
	return names;
}

/**
 * One check a metric, as a functional test judges it: of N steps at most N / 100 may be off, at least one and at most 50, so the
 * largest error behind those has to lie within the tolerance. A step that the log lacks is off.
 */
function testChecks(
	golden: string,
	log: string,
	expected: Series,
	found: (metric: string) => ReadonlyMap<number, number> | undefined,
	metrics: readonly string[],
): Check[] {
	return metrics.map((metric) => {
		const wanted = expected.get(metric);
		const mine = found(metric);
		if (wanted === undefined) throw new UserError(`${golden} has no ${metric}, which the test compares.`);
		if (mine === undefined) throw new UserError(`${log} has no ${metric}, which the test compares.`);
		const steps = [...wanted].map(([step, value]) => {
			const actual = mine.get(step) ?? Number.NaN;
			const error = relative(actual, value);
			return { step, value, actual, error: Number.isNaN(error) ? Number.POSITIVE_INFINITY : error };
		});
		const spared = steps.length === 1 ? 0 : Math.min(Math.max(Math.floor(steps.length / 100), 1), 50);
		const worst = steps.sort((a, b) => b.error - a.error)[spared]!;
		const name = `step ${worst.step} ${metric}`;
		return { name, expected: worst.value, actual: worst.actual, error: worst.error, limit: testTolerances[metric]! };
	});
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
