/**
 * The configuration that a checkpoint of this program holds, as the default of a training that goes on from it: `mimo train
 * --load FOLDER` needs no other flag.
 */
import { existsSync } from "node:fs";
import { isCheckpoint, isInHub, isStoreUrl, storedConfiguration } from "../../checkpoint/index.ts";
import { gridKeys } from "../../config/keys/parallel.ts";
import { shownConfiguration } from "../../config/print.ts";
import type { ResolvedConfiguration } from "../../config/resolve.ts";
import { modelPartOf } from "../../config/same-model.ts";
import { type Key, keys, propertyOf, subjects } from "../../config/schema.ts";
import { describeOrigin, type Entry } from "../../config/sources.ts";
import { UserError } from "../../system/errors.ts";
import { isMegatron } from "./megatron-checkpoint.ts";

/** Keys that say where a run starts, which a run that goes on decides anew. */
const starting: readonly Key[] = [
	...(["load", "ckpt-step", "finetune", "pretrained-checkpoint", "load-peft", "exit-on-missing-checkpoint"] as const),
	...(["no-load-optim", "no-load-scheduler", "no-load-rng", "override-ckpt-iteration", "allow-fallback"] as const),
	...(["override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler"] as const),
];

/**
 * Folders whose weights a training began from. A run that goes on needs them no more: its checkpoint holds what is kept of them, but for
 * the names of modules that a PEFT folder is written under.
 */
const began: readonly Key[] = ["load-hf", "load-vision", "load-projector"];

const isGone = (path: unknown) => typeof path === "string" && !isStoreUrl(path) && !existsSync(path) && !isInHub(path);

/** Keys that decide a thing together: where one is given, the others do not come from the checkpoint. */
const together: readonly (readonly Key[])[] = [gridKeys, ["train-iters", "train-samples", "train-epochs"]];

/**
 * Entries beneath all others with the configuration that is stored in the checkpoint of --load. There are none where a file or a
 * preset describes the run, where the checkpoint is not of this program, or where only its weights are loaded. Values that equal
 * fixed defaults are among them: the folders that they name have defaults of their own.
 */
export function storedEntries(given: readonly Entry[]): Entry[] {
	const givenValue = (key: Key) => given.findLast((entry) => entry.key === key)?.value;
	const described = given.some(({ key, origin }) => key === "preset" || origin.source === "file");
	const stored = described ? null : storedConfiguration(givenValue);
	const load = givenValue("load");
	const saysModel = described || given.some(({ key }) => key === "load-hf" || modelPartOf(key) !== null);
	const starts = saysModel || stored !== null || givenValue("finetune") === true;
	if (!starts && typeof load === "string" && !isStoreUrl(load) && !isCheckpoint(load) && !isMegatron(load)) {
		throw new UserError(
			`${load} (load) holds no native or torch_dist checkpoint; a new training needs --config, --preset or --load-hf.`,
		);
	}
	// A checkpoint that was converted from another program's describes its model alone.
	if (stored === null || !("modelProvider" in stored.values)) return [];
	const { path, values } = stored;
	const isGiven = (key: Key) => given.some((entry) => entry.key === key);
	const decided = together
		.filter((group) => group.some(isGiven))
		.flatMap((group) => group.filter((key) => !isGiven(key)));
	// The steps follow again from the passes, which another global-batch-size may change.
	const counted: readonly Key[] = typeof values.trainEpochs === "number" ? ["train-iters"] : [];
	const writesAdapters = (givenValue("save-peft") ?? values.savePeft ?? null) !== null;
	const left = new Set([...starting, ...decided, ...counted]);
	return keys.flatMap((key): Entry[] => {
		const value = values[propertyOf(key)];
		if (value === undefined || left.has(key)) return [];
		if (began.includes(key) && !writesAdapters && isGone(value)) return [];
		// The run goes on in its own folder, wherever that lies now.
		const here = key === "save" && value !== null ? givenValue("load") : value;
		return [{ key, value: here, origin: { source: "checkpoint", path } }];
	});
}

/** Keys that change a training and neither its model nor where it runs and what it writes. */
const ofTraining = (key: Key): boolean =>
	modelPartOf(key) === null &&
	!starting.includes(key) &&
	!/^(exit|eval)-|^(micro-batch-size|use-distributed-optimizer|data-(memory|prefetch|threads|cache-.*))$/.test(key) &&
	!["Run", "Logging", "Checkpoints", "Layout"].some((subject) => key in subjects[subject as keyof typeof subjects]);

/**
 * "Changed since checkpoint FOLDER: flag --lr 0.001 (0.002 there)."; empty where nothing is changed. `stored`: the checkpoint's entries
 * beneath the run's. A run that a file or a preset describes has no such entries: its keys that change the training are compared with
 * the checkpoint's.
 */
export function changesSince(
	stored: readonly Entry[],
	{ configuration, origins }: Pick<ResolvedConfiguration, "configuration" | "origins">,
): string[] {
	const now = shownConfiguration(configuration);
	const there = stored.length > 0 ? null : storedConfiguration((key) => configuration[propertyOf(key)]);
	const compared =
		there === null || !("modelProvider" in there.values)
			? stored
			: keys.flatMap((key): Entry[] => {
					const value = there.values[propertyOf(key)];
					const same = value === undefined || origins[key].source === "derived" || !ofTraining(key);
					return same ? [] : [{ key, value, origin: { source: "checkpoint", path: there.path } }];
				});
	const shown = (value: unknown) => (value === null ? "unset" : [value].flat().join(" "));
	const changes = compared.flatMap(({ key, value }) => {
		if (origins[key].source === "checkpoint" || Bun.deepEquals(now[propertyOf(key)], value)) return [];
		const name = origins[key].source === "flag" ? describeOrigin(origins[key]) : key;
		return [`${name} ${shown(now[propertyOf(key)])} (${shown(value)} there)`];
	});
	return changes.length === 0 ? [] : [`Changed since ${describeOrigin(compared[0]!.origin)}: ${changes.join(", ")}.`];
}
