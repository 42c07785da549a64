/**
 * The configuration that a checkpoint of this program holds, as the default of a training that goes on from it: `mimo train
 * --load FOLDER` needs no other flag.
 */
import { join } from "node:path";
import { isCheckpoint, NativeCheckpoint } from "../../checkpoint/native/reader.ts";
import { iterationName } from "../../checkpoint/native/writer.ts";
import { describedModel } from "../../checkpoint/training/megatron-record.ts";
import { gridKeys } from "../../config/keys/parallel.ts";
import type { ResolvedConfiguration } from "../../config/resolve.ts";
import { fieldOf, type Key, keys, propertyOf } from "../../config/schema.ts";
import { describeOrigin, type Entry } from "../../config/sources.ts";
import { UserError } from "../../system/errors.ts";

/** Keys that say where a run starts, which a run that goes on decides anew. */
const starting: readonly Key[] = [
	...(["load", "ckpt-step", "finetune", "pretrained-checkpoint", "load-peft", "exit-on-missing-checkpoint"] as const),
	...(["no-load-optim", "no-load-rng", "override-ckpt-iteration", "allow-fallback"] as const),
	...(["override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler"] as const),
];

/** Keys that decide a thing together: where one is given, the others do not come from the checkpoint. */
const together: readonly (readonly Key[])[] = [gridKeys, ["train-iters", "train-samples", "train-epochs"]];

/**
 * Entries beneath all others with the configuration that is stored in the checkpoint of --load. There are none where a file or a
 * preset describes the run, where the checkpoint is not of this program, or where only its weights are loaded.
 */
export function storedEntries(given: readonly Entry[]): Entry[] {
	const givenValue = (key: Key) => given.findLast((entry) => entry.key === key)?.value;
	const load = givenValue("load");
	const described = given.some(({ key, origin }) => key === "preset" || origin.source === "file");
	if (typeof load !== "string" || described || givenValue("finetune") === true || !isCheckpoint(load)) return [];
	const step = givenValue("ckpt-step");
	using checkpoint = openOrNull(typeof step === "number" ? join(load, iterationName(step)) : load);
	if (checkpoint === null) return [];
	const stored = describedModel(checkpoint.manifest);
	// A checkpoint that was converted from another program's describes its model alone.
	if (!("modelProvider" in stored)) return [];
	const isGiven = (key: Key) => given.some((entry) => entry.key === key);
	const decided = together
		.filter((group) => group.some(isGiven))
		.flatMap((group) => group.filter((key) => !isGiven(key)));
	// The steps follow again from the passes, which another global-batch-size may change.
	const counted: readonly Key[] = typeof stored.trainEpochs === "number" ? ["train-iters"] : [];
	return keys.flatMap((key): Entry[] => {
		const value = stored[propertyOf(key)];
		const known = value !== undefined && !Bun.deepEquals(value, fieldOf(key).default ?? null);
		if (!known || starting.includes(key) || [...decided, ...counted].includes(key)) return [];
		// The run goes on in its own folder, wherever that lies now.
		return [{ key, value: key === "save" ? load : value, origin: { source: "checkpoint", path: checkpoint.path } }];
	});
}

/** Null for a damaged checkpoint: the ranks name the damage, or take an older one. */
function openOrNull(path: string): NativeCheckpoint | null {
	try {
		return NativeCheckpoint.openExactly(path);
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}

/** "Changed since checkpoint FOLDER: flag --lr 0.001 (0.002 there)."; empty where nothing is changed. */
export function changesSince(
	stored: readonly Entry[],
	{ configuration, origins }: Pick<ResolvedConfiguration, "configuration" | "origins">,
): string[] {
	const shown = (value: unknown) => [value].flat().join(" ");
	const changes = stored.flatMap(({ key, value }) => {
		const now = configuration[propertyOf(key) as keyof typeof configuration];
		if (origins[key].source === "checkpoint" || Bun.deepEquals(now, value)) return [];
		return [`${describeOrigin(origins[key])} ${shown(now)} (${shown(value)} there)`];
	});
	return changes.length === 0 ? [] : [`Changed since ${describeOrigin(stored[0]!.origin)}: ${changes.join(", ")}.`];
}
