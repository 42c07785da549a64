/**
 * Loader states of the Python package: to and from this program's (docs/spec/energon.md §4.1). The values here are
 * those of its JSON dumps and unpickled files: records with `__type__`, bytes, lists, numbers.
 */
import type { StreamState } from "../../../src/data/energon/worker.ts";
import { GeneratorState, type NodeState, type StateValue } from "../../../src/data/energon/wrappers/dataset.ts";
import { UserError } from "../../../src/system/errors.ts";

export type EnergonValue =
	| null
	| undefined
	| number
	| string
	| boolean
	| Uint8Array
	| Uint32Array
	| readonly EnergonValue[]
	| EnergonRecord;

export interface EnergonRecord {
	readonly [name: string]: EnergonValue;
}

/** State of one logical worker: a stored position and how many outputs to go on from there. */
export interface WorkerCheckpoint {
	/** Null: the worker's beginning. `simple`: of a loader without workers. */
	readonly state: (StreamState & { readonly simple?: boolean }) | null;
	readonly offset: number;
}

/** State of a rank's loader. */
export interface RankState {
	readonly workers: readonly WorkerCheckpoint[];
	readonly nextWorker: number;
	readonly microBatchSize: number | null;
}

/** Nodes the Python loader adds around the pipeline; they have no state. */
const wrappers = ["GcDataset", "WatchdogDataset"];

function record(value: EnergonValue, what: string): EnergonRecord {
	const plain = value !== null && typeof value === "object" && !Array.isArray(value);
	if (!plain || value instanceof Uint8Array || value instanceof Uint32Array) {
		throw new UserError(`The Energon state has no ${what}.`);
	}
	return value as EnergonRecord;
}

function list(value: EnergonValue, what: string): readonly EnergonValue[] {
	if (!Array.isArray(value)) throw new UserError(`The Energon state has no list of ${what}.`);
	return value;
}

function number(value: EnergonValue, what: string): number {
	if (typeof value !== "number") throw new UserError(`The Energon state has no ${what}.`);
	return value;
}

/** Reads a rank's state; null when its workers had never started. */
export function readEnergonState(value: EnergonValue): RankState | null {
	if (value === null) return null;
	const state = record(value, "loader state");
	const workers = list(state.worker_states, "worker states").map((worker) =>
		readWorker(record(worker, "worker state")),
	);
	const { micro_batch_size: batch } = state;
	return {
		workers,
		nextWorker: number(state.next_worker_id, "next_worker_id"),
		microBatchSize: batch == null ? null : number(batch, "micro_batch_size"),
	};
}

function readWorker(worker: EnergonRecord): WorkerCheckpoint {
	if (worker.__type__ !== "SavableDatasetCheckpoint") {
		// Without workers the tree stands alone, and the process's generators are not saved.
		const root = record(worker, "dataset state");
		const state = {
			index: number(root._sample_index, "_sample_index"),
			dataset: unwrap(root, ["SimpleSavableDatasetWrapper", ...wrappers]),
			simple: true,
		};
		return { state, offset: 0 };
	}
	const offset = number(worker.offset, "offset");
	if (worker.state === null) return { state: null, offset };
	const state = record(worker.state, "state of a checkpoint");
	return {
		offset,
		state: {
			index: number(state.sample_index, "sample_index"),
			dataset: unwrap(record(state.dataset_state, "dataset_state"), wrappers),
		},
	};
}

/** The pipeline below the nodes that the Python loader puts around it. */
function unwrap(root: EnergonRecord, classes: readonly string[]): NodeState {
	let node = root;
	for (const name of classes) {
		if (node.__class__ !== name)
			throw new UserError(`The Energon state has ${String(node.__class__)} instead of ${name}.`);
		node = record(list(node.datasets, "datasets")[0], `dataset of ${name}`);
	}
	return readValue(node) as unknown as NodeState;
}

function readValue(value: EnergonValue): StateValue {
	if (value instanceof Uint8Array) return GeneratorState.fromBytes(value);
	if (value instanceof Uint32Array) return [...value];
	if (Array.isArray(value)) return value.map(readValue);
	if (value === null || value === undefined) return null;
	if (typeof value !== "object") return value as StateValue;
	const entries = Object.entries(value as EnergonRecord).filter(([name]) => name !== "__type__");
	return Object.fromEntries(entries.map(([name, item]) => [name, readValue(item)]));
}

/** A rank's state as the Python package would hold it; `simple`: of a loader without workers. */
export function writeEnergonState(state: RankState, simple: boolean): EnergonRecord {
	return {
		__type__: "SavableDataLoaderState",
		worker_states: state.workers.map((worker) => writeWorker(worker, simple)),
		next_worker_id: state.nextWorker,
		micro_batch_size: state.microBatchSize,
	};
}

function writeWorker({ state, offset }: WorkerCheckpoint, simple: boolean): EnergonRecord {
	if (simple) {
		const { index, dataset } = state!;
		const tree = wrap(writeValue(dataset as unknown as StateValue) as EnergonRecord);
		return flex({ __class__: "SimpleSavableDatasetWrapper", _sample_index: index, datasets: [tree] });
	}
	const inner = state && {
		__type__: "SavableDatasetState",
		dataset_state: wrap(writeValue(state.dataset as unknown as StateValue) as EnergonRecord),
		sample_index: state.index,
	};
	return { __type__: "SavableDatasetCheckpoint", state: inner, offset };
}

function flex(fields: EnergonRecord): EnergonRecord {
	return { __type__: "FlexState", ...fields };
}

function wrap(tree: EnergonRecord): EnergonRecord {
	return wrappers.toReversed().reduce((inner, name) => flex({ __class__: name, datasets: [inner] }), tree);
}

function writeValue(value: StateValue): EnergonValue {
	if (value === null || typeof value !== "object") return value;
	if (value instanceof GeneratorState) return value.bytes;
	if (Array.isArray(value)) return value.map(writeValue);
	const fields = Object.entries(value as Readonly<Record<string, StateValue>>);
	const written = Object.fromEntries(fields.map(([name, item]) => [name, writeValue(item)]));
	const names = new Set(Object.keys(written));
	if (names.size === 2 && names.has("index") && names.has("current")) return { __type__: "SliceState", ...written };
	const isNode = ["__class__", "rng", "batch_size"].some((name) => names.has(name));
	return isNode ? flex(written) : written;
}
