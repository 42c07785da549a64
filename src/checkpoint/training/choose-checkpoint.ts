/**
 * Chooses the checkpoint that a run starts from: the newest, or a named one, after every byte of it was compared with its
 * checksum, and finds those of the folder that the run may replace. The ranks share the work of checking and agree on the
 * answer.
 */
import { existsSync, realpathSync, statSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { type Key, propertyOf } from "../../config/schema.ts";
import type { FolderReader } from "../../config/sources.ts";
import { exchangeTexts, type Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { indexName } from "../native/manifest.ts";
import { isCheckpoint, latestIteration, listIterations, NativeCheckpoint } from "../native/reader.ts";
import { iterationName } from "../native/writer.ts";
import { type CheckpointStore, localFolder, type Share } from "../remote/checkpoint-store.ts";
import { describedModel } from "./record.ts";

interface Choice {
	/** Folder of checkpoints, or one checkpoint. */
	readonly path: string;
	/** null: the newest. */
	readonly iteration: number | null;
	/** Take an older one when the newest is damaged. */
	readonly allowFallback: boolean;
}

/**
 * Opens the checkpoint on every rank of `world`, which call this together; `note` is called when another one than `latest` names is taken.
 * Throws the same UserError everywhere: damaged, with the name of the newest good one; or absent.
 */
export function openChecked(choice: Choice, world: Group, note: (sentence: string) => void): NativeCheckpoint {
	const [text] = exchangeTexts(world, world.rank === 0 ? JSON.stringify(candidates(choice)) : "") as [string];
	const paths = JSON.parse(text) as string[];
	let damage: string | null = null;
	for (const path of paths) {
		const { checkpoint, failure } = openOne(path, world);
		if (checkpoint === null) {
			damage ??= failure;
			continue;
		}
		if (damage === null) {
			if (checkpoint.notice !== null) note(checkpoint.notice);
			return checkpoint;
		}
		if (choice.allowFallback) {
			note(`${damage} Going on from ${checkpoint.path}, an older checkpoint (--allow-fallback).`);
			return checkpoint;
		}
		checkpoint[Symbol.dispose]();
		throw new UserError(`${damage} The newest good checkpoint is ${checkpoint.path} (--allow-fallback takes it).`);
	}
	const alone = paths.length === 1 ? "" : ` There is no good checkpoint in ${choice.path}.`;
	throw new UserError(`${damage}${alone}`);
}

/**
 * Checkpoints to try, best first. The first is opened as it was named: through `latest`, if there is one, whose checksum it
 * then must have.
 */
function candidates({ path, iteration }: Choice): string[] {
	if (iteration !== null) {
		const folder = join(path, iterationName(iteration));
		if (!existsSync(join(folder, indexName))) {
			const list = existsSync(path) ? listIterations(path).join(", ") : "";
			throw new UserError(`${path} has no checkpoint of step ${iteration} (it has ${list || "none"}).`);
		}
		return [folder];
	}
	if (existsSync(join(path, indexName)) || !existsSync(path)) return [path];
	return [
		path,
		...listIterations(path)
			.reverse()
			.map((name) => join(path, name)),
	];
}

/** Ranks that wait for a store look together this often, in milliseconds: a run without progress counts as stuck. */
const longestWait = 5000;

/** The sentence with which the work of any rank has failed, when all have ended; null: none has. Every rank of `group` calls this together. */
export async function failureOfAny(group: Group, own: Promise<unknown>): Promise<string | null> {
	let failure: string | null = null;
	const work = own.then(
		() => {
			failure = "";
		},
		(error) => {
			if (!(error instanceof UserError)) throw error;
			failure = error.message;
		},
	);
	let states: (string | null)[];
	do {
		await Promise.race([work, Bun.sleep(longestWait)]);
		states = exchangeTexts(group, JSON.stringify(failure)).map((text) => JSON.parse(text) as string | null);
	} while (states.includes(null));
	return states.find((state) => state !== "") ?? null;
}

/**
 * Brings the checkpoint that `openChecked` will open from a store to every host, each rank a `share` of its host's files. Every rank
 * of `world` calls this together. Throws the same UserError everywhere.
 */
export async function bringChosen(store: CheckpointStore, choice: Choice, world: Group, share: Share): Promise<void> {
	if (!store.staged) return;
	const [text] = exchangeTexts(world, world.rank === 0 ? JSON.stringify(stagedNames(choice)) : "") as [string];
	let damage = "";
	for (const name of JSON.parse(text) as string[]) {
		const failed = await failureOfAny(world, store.bring(name, share));
		if (failed === null) return;
		damage ||= failed;
		if (!choice.allowFallback) throw new UserError(`${damage} An older checkpoint is taken with --allow-fallback.`);
	}
	if (damage !== "") throw new UserError(`${damage} There is no good checkpoint in ${store.path}.`);
}

/** Names of the candidates below their folder; "" is the folder itself. */
function stagedNames(choice: Choice): string[] {
	const { path } = choice;
	const names = candidates(choice).map((candidate) => (candidate === path ? newestName(path) : basename(candidate)));
	return [...new Set(names)];
}

function newestName(path: string): string {
	if (existsSync(join(path, indexName))) return "";
	return latestName(path) || (listIterations(path).at(-1) ?? "");
}

/** Opens a checkpoint and checks this rank's share of its bytes; damage that any rank finds counts for all. */
function openOne(path: string, world: Group): { checkpoint: NativeCheckpoint | null; failure: string } {
	let checkpoint: NativeCheckpoint | null = null;
	let own = "";
	try {
		checkpoint = NativeCheckpoint.openExactly(path);
		checkpoint.verify({ part: world.rank, parts: world.size });
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		own = error.message;
	}
	const failure = exchangeTexts(world, own).find((text) => text !== "");
	if (failure === undefined) {
		checkpoint?.trust();
		return { checkpoint, failure: "" };
	}
	checkpoint?.[Symbol.dispose]();
	return { checkpoint: null, failure };
}

/** The checkpoint that a run starts from. */
export interface Start {
	/** Folder of checkpoints, or one checkpoint. */
	readonly path: string;
	/** null: the newest. */
	readonly iteration: number | null;
	/** Weights alone: a new training. */
	readonly finetune: boolean;
}

/**
 * Names of the checkpoints in `save` that a run may replace and delete: the one that it starts from and, going on with
 * the training, the older ones and those that the same training has written after it. Throws a UserError that names all
 * others, if there are any.
 */
export function requireOwnSteps(save: string, start: Start | null): string[] {
	// A --save that is not a folder is refused by the check of writable folders.
	if (!existsSync(save) || !statSync(save).isDirectory()) return [];
	const names = listIterations(save);
	const loaded = start === null ? null : loadedName(save, start, names);
	const position = loaded === null ? -1 : names.indexOf(loaded);
	const own = start?.finetune ? names.slice(position, position + 1) : names.slice(0, position + 1);
	if (loaded !== null && !start?.finetune) {
		// A training that went back a few steps, or was killed before it could name its newest checkpoint.
		const lineage = lineageOf(save, loaded);
		own.push(...names.slice(position + 1).filter((name) => lineage !== null && lineageOf(save, name) === lineage));
	}
	const foreign = names.filter((name) => !own.includes(name));
	if (foreign.length === 0) return own;
	const goesOn = loaded === null || start?.finetune ? `--load ${save} goes on from the newest, ` : "";
	throw new UserError(
		`--save ${save} holds ${listed(foreign)}, which this run neither loads nor has written: ${goesOn}--save-over lets this run replace and delete checkpoints that are not its own.`,
	);
}

/** The checkpoint of `save` that a run starts from; null: it starts from none there. */
function loadedName(save: string, { path, iteration }: Start, names: readonly string[]): string | null {
	const [folder, from] = [realpathSync(save), realpathSync(path)];
	if (existsSync(join(from, indexName))) return dirname(from) === folder ? basename(from) : null;
	if (from !== folder) return null;
	if (iteration !== null) return iterationName(iteration);
	const latest = latestName(save);
	return names.includes(latest) ? latest : (names.at(-1) ?? null);
}

/** The checkpoint that latest.json names, or "" where that is damaged: then the newest one is tried. */
function latestName(save: string): string {
	try {
		return iterationName(latestIteration(save));
	} catch (error) {
		if (error instanceof UserError) return "";
		throw error;
	}
}

/** Name of the run that began the training of a checkpoint; null: it does not say, or cannot be read. */
function lineageOf(save: string, name: string): string | null {
	try {
		using checkpoint = NativeCheckpoint.openExactly(join(save, name));
		const { lineage } = checkpoint.manifest.common;
		return typeof lineage === "string" ? lineage : null;
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}

function listed(names: readonly string[]): string {
	if (names.length > 3) return `${names[0]} to ${names.at(-1)} (${names.length} checkpoints)`;
	return names.join(" and ");
}

const text: readonly Key[] = ["conversation-template", "image-tag-type"];
const images: readonly Key[] = [
	...(["dynamic-resolution", "dynamic-resolution-min-patches", "dynamic-resolution-max-patches"] as const),
	...(["use-tiling", "max-num-tiles", "use-thumbnail", "img-h", "img-w", "image-mean", "image-std"] as const),
];

/** A configuration by property, and the checkpoint that holds it. */
interface StoredConfiguration {
	readonly path: string;
	readonly values: ReturnType<typeof describedModel>;
}

/**
 * The configuration in the checkpoint that a training goes on from. Null where `load` names no checkpoint of this program, where only
 * its weights are loaded, and where it is damaged: the ranks name the damage, or take an older one.
 */
export function storedConfiguration(given: (key: Key) => unknown): StoredConfiguration | null {
	const [load, step, staging] = [given("load"), given("ckpt-step"), given("staging-dir")];
	if (typeof load !== "string" || given("finetune") === true) return null;
	const folder = localFolder(load, typeof staging === "string" ? staging : null);
	if (!isCheckpoint(folder)) return null;
	try {
		using checkpoint = NativeCheckpoint.openExactly(
			typeof step === "number" ? join(folder, iterationName(step)) : folder,
		);
		return { path: checkpoint.path, values: describedModel(checkpoint.manifest) };
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}

/**
 * Keys that say how text and images are read. Their defaults come from folders and may be others by now; the training keeps those that
 * it began with.
 */
export const readStoredDataKeys: FolderReader = (given) => {
	const stored = storedConfiguration(given);
	if (stored === null) return [];
	const own = (given("chat-template") ?? null) === null ? [...text, ...images] : images;
	return own.flatMap((key) => {
		const value = stored.values[propertyOf(key)];
		return value === undefined ? [] : [{ key, value, from: stored.path, fixed: false }];
	});
};
