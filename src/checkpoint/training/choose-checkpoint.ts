/**
 * Chooses the checkpoint that a run starts from: the newest, or a named one, after every byte of it was compared with
 * its checksum. The ranks share the work of checking and agree on the answer.
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { exchangeTexts, type Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { indexName } from "../native/manifest.ts";
import { listIterations, NativeCheckpoint } from "../native/reader.ts";
import { iterationName } from "../native/writer.ts";

export interface Choice {
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
