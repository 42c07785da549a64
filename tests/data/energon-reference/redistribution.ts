/** Replays the states of several ranks: redistribution to another number of ranks, global states, refusals. */

import { EmulatedLoader, type EmulatedOutput } from "./emulated-loader.ts";
import { difference, type Row, readGolden, revive, rowDifference, rowOf, type StateFile } from "./golden.ts";
import { deliver } from "./orders.ts";
import { type RankState, readEnergonState } from "./python-state.ts";
import { redistribute } from "./redistribute.ts";
import type { Parameters, Setting } from "./setup.ts";
import { stateDifference } from "./states.ts";

export interface RedistributionFile {
	readonly dataset: string;
	readonly saved_with: Parameters;
	readonly state_files_of: string;
	readonly shards: readonly string[];
	readonly redistributed: readonly {
		readonly new_world_size: number;
		readonly new_num_workers?: number;
		readonly tool_error?: string;
		readonly ranks?: readonly {
			readonly rank: number;
			readonly next_worker_id: number;
			readonly worker_states: readonly { readonly sample_index: number; readonly offset: number }[];
			readonly next: readonly Row[];
		}[];
	}[];
	readonly direct_restores: readonly {
		readonly what: string;
		readonly outcome: string;
		readonly next?: { readonly outcome: string };
	}[];
}

function attempt(run: () => void): "ok" | "exception" {
	try {
		run();
		return "ok";
	} catch {
		return "exception";
	}
}

export function replayRedistribution(setting: Setting, file: RedistributionFile): string | null {
	const source = readGolden<StateFile>(setting.golden, file.state_files_of);
	const states = source.ranks.map(({ state }) => readEnergonState(revive(state))!);
	for (const entry of file.redistributed) {
		const what = `to ${entry.new_world_size} ranks`;
		if (entry.ranks === undefined) {
			if (attempt(() => redistribute(states, entry.new_world_size)) === "exception") continue;
			return `${what}: accepted, but Energon refuses it`;
		}
		const parameters: Parameters = {
			...file.saved_with,
			world_size: entry.new_world_size,
			num_workers: entry.new_num_workers!,
		};
		const moved = redistribute(states, entry.new_world_size);
		for (const golden of entry.ranks) {
			const state = moved[golden.rank]!;
			const summary = state.workers.map((worker) => ({ sample_index: worker.state!.index, offset: worker.offset }));
			const loader = new EmulatedLoader(setting, file.dataset, parameters, golden.rank);
			loader.restore(state);
			const row = ({ item, worker }: EmulatedOutput) => rowOf(item, worker, setting.golden, file.shards);
			const found =
				difference(summary, golden.worker_states, `${what}, rank ${golden.rank}, workers`) ??
				difference(state.nextWorker, golden.next_worker_id, `${what}, rank ${golden.rank}, next worker`) ??
				rowDifference(deliver(loader, golden.next.length, row).rows, golden.next, `${what}, rank ${golden.rank}`);
			if (found !== null) return found;
		}
	}
	for (const { what, outcome, next } of file.direct_restores) {
		const found = difference(directRestore(setting, file, states, what), [outcome, next?.outcome ?? null], what);
		if (found !== null) return found;
	}
	return null;
}

/** Result of restoring a state into another loader without redistribution: [restore, first outputs]. */
function directRestore(
	setting: Setting,
	file: RedistributionFile,
	states: readonly RankState[],
	what: string,
): [string, string | null] {
	const { saved_with: saved } = file;
	const into = (changed: Partial<Parameters>) => new EmulatedLoader(setting, file.dataset, { ...saved, ...changed }, 0);
	const all = (world: number): [string, string | null] => [states.length === world ? "ok" : "exception", null];
	if (what.includes("world_size 1")) return all(1);
	if (what.includes("twice the ranks")) return all(2 * saved.world_size);
	const changed: Partial<Parameters> = what.includes("one more worker")
		? { num_workers: saved.num_workers + 1 }
		: what.includes("0 workers")
			? { num_workers: 0 }
			: what.includes("batch_size 4")
				? { batch_size: 4 }
				: { world_size: 2 * saved.world_size };
	const loader = into(changed);
	const restored = attempt(() => loader.restore(states[0]!));
	if (restored === "exception" || changed.world_size === undefined) return [restored, null];
	return [restored, attempt(() => deliver(loader, 40, ({ item }) => item.restoreKey))];
}

export interface GlobalFile {
	readonly dataset: string;
	readonly parameters: Parameters;
	readonly outputs_before_save: number;
	/** Shards of every rank. */
	readonly shards: readonly (readonly string[])[];
	readonly global_state: readonly unknown[];
	readonly ranks: readonly { readonly rank: number; readonly before: readonly Row[]; readonly next: readonly Row[] }[];
}

export function replayGlobal(setting: Setting, file: GlobalFile): string | null {
	for (const [i, { rank, before, next }] of file.ranks.entries()) {
		const row = ({ item, worker }: EmulatedOutput) => rowOf(item, worker, setting.golden, file.shards[i]!);
		const loader = new EmulatedLoader(setting, file.dataset, file.parameters, rank);
		const delivered = deliver(loader, before.length, row).rows;
		const restored = new EmulatedLoader(setting, file.dataset, file.parameters, rank);
		restored.restore(readEnergonState(revive(file.global_state[rank])));
		const found =
			rowDifference(delivered, before, `rank ${rank} before the save`) ??
			stateDifference(loader.save(), file.global_state[rank], file.parameters, `rank ${rank}, state`) ??
			rowDifference(deliver(restored, next.length, row).rows, next, `rank ${rank} restored`);
		if (found !== null) return found;
	}
	return null;
}

export interface RefusalFile {
	readonly dataset?: string;
	readonly cases: readonly {
		readonly what: string;
		readonly saved_with: Parameters;
		readonly restored_with: Parameters | null;
		readonly outcome: string;
		readonly iterating?: { readonly outcome: string; readonly value?: readonly (readonly string[])[] };
	}[];
}

export function replayRefusals(setting: Setting, file: RefusalFile): string | null {
	const dataset = file.dataset ?? "datasets/captions";
	for (const { what, saved_with: saved, restored_with: resumed, outcome, iterating } of file.cases) {
		const keys = ({ item }: EmulatedOutput) => (item as unknown as { keys: string[] }).keys;
		let found: string | null;
		if (resumed === null) {
			const numbers = what.match(/\d+/g)!.map(Number);
			const changed = { prefetch_factor: numbers[0]!, n_checkpoints: numbers[1]! };
			const built = attempt(() => new EmulatedLoader(setting, dataset, { ...saved, ...changed }, 0));
			found = difference(built, outcome, what);
		} else {
			const loader = new EmulatedLoader(setting, dataset, saved, 0);
			const same = what.includes("the same 0-worker loader");
			deliver(loader, same ? 3 : 5, keys);
			const state = loader.save();
			const other =
				same || what.includes("whose workers run") ? loader : new EmulatedLoader(setting, dataset, resumed, 0);
			found = difference(
				attempt(() => other.restore(state)),
				outcome,
				what,
			);
			if (found === null && iterating !== undefined) {
				const expected = iterating.value ?? [];
				let rows: readonly Row[] = [];
				const result = attempt(() => {
					rows = deliver(other, iterating.value?.length ?? 40, keys).rows;
				});
				found = difference(result, iterating.outcome, `${what}, iterating`);
				if (found === null && result === "ok") found = rowDifference(rows, expected, what);
			}
		}
		if (found !== null) return found;
	}
	return null;
}
