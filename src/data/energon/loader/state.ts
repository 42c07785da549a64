/** The state of a loader, from which it continues exactly: versioned JSON, compressed with zstd. */
import { UserError } from "../../../system/errors.ts";
import { GeneratorState, type NodeState, type StateValue } from "../wrappers/dataset.ts";

/** Position of a logical worker. */
export interface WorkerPosition {
	/** Number of the worker's next output, counted over all passes. */
	readonly index: number;
	readonly dataset: NodeState;
}

export interface LoaderState {
	/** Settings at the save, by name. */
	readonly settings: Readonly<Record<string, string>>;
	readonly rank: number;
	readonly worldSize: number;
	readonly numWorkers: number;
	/** Logical worker whose turn is next. */
	readonly nextWorker: number;
	/** Whether each worker's pass has ended, so that it waits for the others. */
	readonly ended: readonly boolean[];
	readonly workers: readonly WorkerPosition[];
}

const FORMAT = "mimo data loader";
const VERSION = 1;
/** Bytes of the largest state. */
const LARGEST_STATE = 2 ** 31;

/** Encodes a value; a generator becomes an object with the single key `$generator`. */
function encodeValue(value: StateValue): unknown {
	if (value instanceof GeneratorState) return { $generator: Buffer.from(value.bytes).toString("base64") };
	if (Array.isArray(value)) return value.map(encodeValue);
	if (value === null || typeof value !== "object") return value;
	return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, encodeValue(item)]));
}

function decodeValue(value: unknown): StateValue {
	if (Array.isArray(value)) return value.map(decodeValue);
	if (value === null || typeof value !== "object") return value as StateValue;
	if ("$generator" in value) {
		return GeneratorState.fromBytes(new Uint8Array(Buffer.from(String(value.$generator), "base64")));
	}
	return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, decodeValue(item)]));
}

/** A position as JSON, for messages of threads and for states. */
export function encodePosition({ index, dataset }: WorkerPosition): unknown {
	return { index, dataset: encodeValue(dataset as unknown as StateValue) };
}

export function decodePosition(encoded: unknown): WorkerPosition {
	const { index, dataset } = encoded as Record<string, unknown>;
	if (typeof index !== "number" || typeof dataset !== "object" || dataset === null) {
		throw new UserError("The loader state has a worker without a position.");
	}
	return { index, dataset: decodeValue(dataset) as unknown as NodeState };
}

/** The state's bytes. */
export function encodeState(state: LoaderState): Uint8Array {
	const { workers, ...rest } = state;
	const json = { format: FORMAT, version: VERSION, ...rest, workers: workers.map(encodePosition) };
	return Bun.zstdCompressSync(new TextEncoder().encode(JSON.stringify(json)));
}

/** Decodes a state. Throws a UserError if the bytes are not a state, or of a later version. */
export function decodeState(bytes: Uint8Array): LoaderState {
	let json: Record<string, unknown>;
	try {
		const text = Bun.zstdDecompressSync(new Uint8Array(bytes));
		if (text.length > LARGEST_STATE) throw new Error("too large");
		json = JSON.parse(new TextDecoder().decode(text));
	} catch {
		throw new UserError("The loader state is damaged: it is not compressed JSON.");
	}
	if (typeof json !== "object" || json === null || json.format !== FORMAT)
		throw new UserError("The file is not a data loader's state.");
	const { version } = json;
	if (typeof version !== "number") throw new UserError("The loader state is damaged: its version is not a number.");
	if (version !== VERSION) {
		throw new UserError(`The loader state has version ${version}; this program reads version ${VERSION}.`);
	}
	const { settings, rank, worldSize, numWorkers, nextWorker, ended, workers } = json;
	const numbers = [rank, worldSize, numWorkers, nextWorker];
	if (
		!Array.isArray(workers) ||
		!Array.isArray(ended) ||
		!numbers.every(Number.isInteger) ||
		typeof settings !== "object" ||
		settings === null
	) {
		throw new UserError("The loader state is damaged: fields are missing.");
	}
	return {
		settings: settings as Record<string, string>,
		rank: rank as number,
		worldSize: worldSize as number,
		numWorkers: numWorkers as number,
		nextWorker: nextWorker as number,
		ended: ended.map((value) => value === true),
		workers: workers.map(decodeWorker),
	};
}

function decodeWorker(encoded: unknown, worker: number): WorkerPosition {
	try {
		return decodePosition(encoded);
	} catch (error) {
		if (error instanceof UserError) throw error;
		throw new UserError(`The loader state is damaged: the position of worker ${worker} cannot be read.`);
	}
}

/** The first place at which two values as JSON differ, and what is there, cut to a line; a saved value may be absent. */
function difference(
	name: string,
	saved: string | undefined,
	value: string,
): [place: string, there: string, here: string] {
	const [there, here] = [saved, value].map((text) => (text?.startsWith("{") ? JSON.parse(text) : null));
	if (there !== null && here !== null) {
		const inner = (json: Record<string, unknown>, key: string) => JSON.stringify(json[key]);
		const key = Object.keys(here).find(
			(one) => inner(here, one) !== undefined && inner(here, one) !== inner(there, one),
		);
		if (key !== undefined) return difference(`${name}.${key}`, inner(there, key), inner(here, key));
	}
	return [name, (saved ?? "(unset)").slice(0, 100), value.slice(0, 100)];
}

/** Throws a UserError for settings that would give other samples; it names the first different setting. */
export function checkSettings(
	before: Readonly<Record<string, string>>,
	settings: Readonly<Record<string, string>>,
): void {
	for (const [name, value] of Object.entries(settings)) {
		const saved = before[name];
		if (saved === value || (name === "batchSize" && divides(value, saved))) continue;
		const [place, there, here] = difference(name, saved, value);
		throw new UserError(
			`The loader state was saved with ${place} = ${there}, this run has ${here}: resume with the setting it was saved with, or start the data from the beginning.`,
		);
	}
}

/** Whether a batch size divides the saved size: then every worker continues with its next sample. */
function divides(value: string, saved: string | undefined): boolean {
	const [now, before] = [Number(value), Number(saved)];
	return Number.isInteger(now) && Number.isInteger(before) && now > 0 && before % now === 0;
}
