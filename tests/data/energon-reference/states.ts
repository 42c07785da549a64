/** Replays `states/`: saved states, the outputs after restoring them, and single outputs restored by key. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import { CryptoHasher } from "bun";
import type { Keyed, RestoreKey } from "../../../src/data/energon/sample.ts";
import { elementOf } from "./elements.ts";
import { EmulatedLoader } from "./emulated-loader.ts";
import {
	comparable,
	difference,
	type RestoredSample,
	type Row,
	revive,
	rowDifference,
	rowOf,
	type StateFile,
} from "./golden.ts";
import { deliver } from "./orders.ts";
import { type EnergonValue, type RankState, readEnergonState, writeEnergonState } from "./python-state.ts";
import type { Parameters, Setting } from "./setup.ts";
import { readTorchState } from "./torch-state.ts";

/** States of a file: its own parameters, and those of the loader that resumes. */
export function replayState(setting: Setting, file: StateFile, name: string): string | null {
	const { parameters, restore_parameters: changed } = file;
	const resuming: Parameters = changed === "same" ? parameters : { ...parameters, ...changed };
	for (const golden of file.ranks) {
		const { rank } = golden;
		const what = `rank ${rank}`;
		const row = ({ item, worker }: { item: Keyed; worker: number }): Row =>
			rowOf(item, worker, setting.golden, file.shards);
		const loader = new EmulatedLoader(setting, file.dataset, parameters, rank);
		const before = deliver(loader, golden.before.length, row);
		const saved = loader.save();
		const continued = golden.uninterrupted_next ?? golden.next;
		const continuedEnds = golden.epoch_ends_uninterrupted_next ?? golden.epoch_ends_next;
		const after = deliver(loader, continued.length, row, { ends: [], untilEnd: continuedEnds?.length ?? 0 });
		const stored = readEnergonState(revive(golden.state));
		const restored = new EmulatedLoader(setting, file.dataset, resuming, rank);
		restored.restore(stored);
		const savedAgain = restored.save();
		const next = deliver(restored, golden.next.length, row, {
			ends: [],
			untilEnd: golden.epoch_ends_next?.length ?? 0,
		});
		const found =
			rowDifference(before.rows, golden.before, `${what} before the save`) ??
			endsDifference(before.ends, golden.epoch_ends_before, `${what} before the save`) ??
			stateDifference(saved, golden.state, parameters, `${what}, state`) ??
			rowDifference(after.rows, continued, `${what} uninterrupted`) ??
			endsDifference(after.ends, continuedEnds, `${what} uninterrupted`) ??
			difference(
				stateDifference(savedAgain, golden.state, resuming, "") === null,
				golden.state_saved_right_after_restore_is_equal,
				`${what}, equality of a state saved right after the restore`,
			) ??
			rowDifference(next.rows, golden.next, `${what} restored`) ??
			endsDifference(next.ends, golden.epoch_ends_next, `${what} restored`) ??
			restoredSamples(setting, file.dataset, parameters, rank, golden.restore_sample ?? []) ??
			torchFileDifference(join(setting.golden, `${name.replace(/\.json$/, "")}.rank${rank}.pt`), golden.state, what);
		if (found !== null) return found;
	}
	return null;
}

function endsDifference(
	actual: readonly number[],
	expected: readonly number[] | undefined,
	what: string,
): string | null {
	return expected === undefined ? null : difference(actual.slice(0, expected.length), expected, `${what}, epoch ends`);
}

/** A state in Energon's own form against a dump of one. */
export function stateDifference(
	state: RankState | null,
	golden: unknown,
	parameters: Parameters,
	what: string,
): string | null {
	const simple = parameters.num_workers === 0;
	const written: EnergonValue = state === null ? null : writeEnergonState(state, simple);
	return difference(comparable(written), comparable(withoutDraws(revive(golden))), what);
}

/** A state without the generators from which functions draw: no function here does. */
function withoutDraws(state: EnergonValue): EnergonValue {
	if (Array.isArray(state)) return state.map(withoutDraws);
	if (state === null || typeof state !== "object" || !("__type__" in state)) return state;
	const fields = Object.entries(state).filter(([name]) => name !== "rng" || state.__type__ !== "SavableDatasetState");
	return Object.fromEntries(fields.map(([name, value]) => [name, withoutDraws(value)]));
}

/** Difference of a state in a file of torch.save, if the file exists. */
function torchFileDifference(path: string, golden: unknown, what: string): string | null {
	if (!existsSync(path)) return null;
	return difference(comparable(readTorchState(path)), comparable(revive(golden)), `${what}, .pt file`);
}

/** Single outputs by key, in order, in one fresh process. */
function restoredSamples(
	setting: Setting,
	dataset: string,
	parameters: Parameters,
	rank: number,
	samples: readonly RestoredSample[],
): string | null {
	const loader = new EmulatedLoader(setting, dataset, parameters, rank);
	for (const [i, sample] of samples.entries()) {
		const what = `rank ${rank}, restored sample ${i}`;
		let item: Keyed;
		try {
			item = loader.restoreSample(sample.restore_key as RestoreKey);
		} catch (error) {
			if (sample.error !== undefined) continue;
			return `${what}: ${(error as Error).message}`;
		}
		if (sample.error !== undefined) return `${what} was restored although Energon fails with ${sample.error}`;
		const found =
			difference(item.restoreKey, sample.restored_key, `${what}, key`) ??
			restoredDifference(item, sample.restored!, what);
		if (found !== null) return found;
	}
	return null;
}

function restoredDifference(item: Keyed, expected: Readonly<Record<string, unknown>>, what: string): string | null {
	const { keys, texts, extra } = elementOf(item);
	const actual: Record<string, unknown> = { keys };
	if ("caption" in expected) actual.caption = texts[0];
	if ("text" in expected) actual.text = texts[0];
	if ("lengths" in expected) actual.lengths = extra;
	if ("text_sha256" in expected) {
		// A hash of Python's JSON of the texts, with or without its escapes.
		const hashes = [texts.map(pythonJson), texts.map((text) => asciiOnly(pythonJson(text)))].map((items) =>
			new CryptoHasher("sha256").update(`[${items.join(", ")}]`).digest("hex"),
		);
		actual.text_sha256 = hashes.find((hash) => hash === expected.text_sha256) ?? hashes[0];
	}
	// Draws of a process without a seed cannot be repeated; the file says so in words.
	if ("extra" in expected)
		actual.extra = typeof expected.extra === "string" && Array.isArray(extra) ? expected.extra : (extra ?? null);
	return difference(actual, expected, what);
}

function pythonJson(text: string): string {
	return JSON.stringify(text);
}

function asciiOnly(json: string): string {
	return json.replace(/[^ -~]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
