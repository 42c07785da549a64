/**
 * Checks `datasets/corrupt/behaviour.json`: which damaged data are refused, when, which samples are dropped, and which
 * still arrive. The wording of errors is this program's own.
 */
import { DecodingError, type ErrorHandler, raiseError } from "../../../src/data/energon/errors.ts";
import type { Keyed, RestoreKey } from "../../../src/data/energon/sample.ts";
import type { Images } from "../../../src/native/images.ts";
import { elementOf } from "./elements.ts";
import { EmulatedLoader } from "./emulated-loader.ts";
import { difference } from "./golden.ts";
import { comparePreparation, type PrepareCase } from "./preparing.ts";
import type { Parameters, Setting } from "./setup.ts";
import { notBuilt } from "./tasks.ts";

interface LoadArguments {
	readonly handler?: "default" | "collect" | "reraise";
	readonly workers?: number;
	readonly world?: number;
	readonly rank?: number;
	readonly enc?: string;
	readonly decoder?: string;
	readonly repeat?: boolean;
	readonly max_outputs?: number;
	readonly batch_size?: number;
	readonly split_part?: string;
	readonly split_config?: string;
	readonly dataset_config?: string;
	readonly parallel_shard_iters?: number;
	readonly shuffle_over_epochs_multiplier?: number | null;
	readonly packing_buffer_size?: number;
	readonly [other: string]: unknown;
}

interface HandlerCall {
	readonly attributes?: { readonly key: string; readonly k: string };
	readonly sources: readonly unknown[];
}

interface LoadCase {
	readonly dataset: string;
	readonly what?: string;
	readonly arguments: LoadArguments;
	readonly delivered: readonly (string | readonly string[])[];
	readonly outcome: "finished" | "exception";
	readonly stage?: "build" | "iterate";
	readonly handler_calls?: readonly HandlerCall[];
	readonly handler_call_count?: number;
}

export interface BehaviourFile {
	readonly loading: readonly LoadCase[];
	readonly restore_sample: readonly {
		readonly what: string;
		readonly dataset: string;
		readonly restore_key: RestoreKey;
		readonly outcome: "ok" | "exception";
		readonly key?: string | null;
	}[];
	readonly prepare: readonly PrepareCase[];
}

/** `images` decodes, as the reference loads do. */
export function checkBehaviour(setting: Setting, images: Images, file: BehaviourFile): string | null {
	const decoding: Setting = { ...setting, images: (bytes) => images.decode(bytes) };
	for (const [i, entry] of file.loading.entries()) {
		if (notBuilt.includes(entry.arguments.enc ?? "")) continue;
		const found = checkLoad(decoding, entry);
		if (found !== null) return `loading case ${i}, ${entry.dataset}${entry.what ? ` (${entry.what})` : ""}: ${found}`;
	}
	for (const entry of file.restore_sample) {
		const found = checkRestore(decoding, entry);
		if (found !== null) return `restoring a sample (${entry.what}): ${found}`;
	}
	for (const entry of file.prepare) {
		const found = comparePreparation(setting, entry);
		if (found !== null) return `${entry.command}: ${found}`;
	}
	return null;
}

function parametersOf({ handler: _, rank: __, decoder: ___, ...given }: LoadArguments): Parameters {
	const { workers, world, enc, max_outputs: ____, ...rest } = given;
	return {
		world_size: world ?? 1,
		num_workers: workers ?? 0,
		task_encoder: enc ?? "Plain",
		repeat: false,
		shuffle_over_epochs_multiplier: null,
		parallel_shard_iters: 1,
		...rest,
	};
}

function checkLoad(setting: Setting, entry: LoadCase): string | null {
	const { arguments: given } = entry;
	const calls: { error: Error; sources: readonly unknown[] }[] = [];
	const collect: ErrorHandler = (error, _, sources) => {
		calls.push({
			error,
			sources: sources.map(({ datasetPath, shardName, index, fileNames }) => [
				datasetPath.replace(`${setting.golden}/`, ""),
				shardName,
				index,
				[...fileNames],
			]),
		});
	};
	const handled: Setting = { ...setting, errorHandler: given.handler === "reraise" ? raiseError : collect };
	const delivered: (string | readonly string[])[] = [];
	let outcome: Pick<LoadCase, "outcome" | "stage"> = { outcome: "finished" };
	let loader: EmulatedLoader | null = null;
	try {
		loader = new EmulatedLoader(handled, entry.dataset, parametersOf(given), given.rank ?? 0);
	} catch {
		outcome = { outcome: "exception", stage: "build" };
	}
	try {
		const most = given.max_outputs ?? Number.POSITIVE_INFINITY;
		while (loader !== null && delivered.length < most) {
			const output = loader.next();
			if (output === null) break;
			const { keys, kind } = elementOf(output.item);
			delivered.push(kind === "sample" ? keys[0]! : keys);
		}
	} catch {
		outcome = { outcome: "exception", stage: "iterate" };
	}
	// Data that Energon refuses before its first output may be refused when the data set is opened.
	const refusedEarly = outcome.stage === "build" && entry.stage === "iterate" && entry.delivered.length === 0;
	// Where Energon calls the handler while its workers run ahead is a matter of their speed: one process alone counts.
	const counted = entry.handler_call_count !== undefined;
	return (
		difference(delivered, entry.delivered, "delivered") ??
		(refusedEarly
			? null
			: difference(outcome, { outcome: entry.outcome, ...(entry.stage && { stage: entry.stage }) }, "outcome")) ??
		(counted ? difference(calls.length, entry.handler_call_count, "handler calls") : null) ??
		handlerDifference(calls, entry.handler_calls ?? [])
	);
}

function handlerDifference(
	calls: readonly { error: Error; sources: readonly unknown[] }[],
	expected: readonly HandlerCall[],
): string | null {
	for (const [i, { attributes, sources }] of expected.entries()) {
		const { error, sources: own } = calls[i]!;
		const named = error instanceof DecodingError ? { key: error.key, k: error.part } : undefined;
		const found =
			(attributes === undefined ? null : difference(named, attributes, `handler call ${i}, key and part`)) ??
			difference(own, sources, `handler call ${i}, sources`);
		if (found !== null) return found;
	}
	return null;
}

function checkRestore(setting: Setting, entry: BehaviourFile["restore_sample"][number]): string | null {
	const logging = entry.what.includes("log_exception");
	const stateful = entry.what.includes("stateful");
	const handled: Setting = { ...setting, restoreErrorHandler: logging ? () => {} : raiseError };
	const parameters = parametersOf({ enc: stateful ? "StatefulEncode" : "Plain" });
	const loader = new EmulatedLoader(handled, entry.dataset, parameters, 0);
	let item: Keyed | undefined;
	try {
		item = loader.restoreSample(entry.restore_key);
	} catch (error) {
		return entry.outcome === "exception" ? null : (error as Error).message;
	}
	if (entry.outcome === "exception") return "it was restored, but Energon refuses it";
	return difference(item === undefined ? null : elementOf(item).keys[0], entry.key, "key");
}
