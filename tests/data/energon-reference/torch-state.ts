/** Loader states that the Python package wrote with torch.save. */
import { openTorchFile, type TorchFile } from "../../../src/checkpoint/pickle/archive.ts";
import { NumpyArray, PythonObject, TensorReference, Tuple } from "../../../src/checkpoint/pickle/values.ts";
import { UserError } from "../../../src/system/errors.ts";
import type { EnergonRecord, EnergonValue } from "./python-state.ts";

/** Classes of a state, by module and name. */
const classes = [
	"megatron.energon.savable_loader SavableDataLoaderState",
	"megatron.energon.savable_loader SavableDatasetCheckpoint",
	"megatron.energon.savable_loader SavableDatasetState",
	"megatron.energon.rng SystemRngState",
	"megatron.energon.state FlexState",
	"megatron.energon.flavors.webdataset.sample_loader SliceState",
];

/** The state in a file; throws a UserError when it holds anything else. */
export function readTorchState(path: string): EnergonValue {
	using file = openTorchFile(path, { inert: classes });
	return new Converter(file, path).convert(file.value);
}

class Converter {
	constructor(
		private readonly file: TorchFile,
		private readonly path: string,
	) {}

	convert(value: unknown): EnergonValue {
		if (value === null || ["number", "string", "boolean"].includes(typeof value)) return value as EnergonValue;
		if (value instanceof Uint8Array) return value;
		if (value instanceof Tuple) return value.items.map((item) => this.convert(item));
		if (Array.isArray(value)) return value.map((item) => this.convert(item));
		if (value instanceof NumpyArray) return this.#words(value);
		if (value instanceof Map) return this.#entries(value);
		if (value instanceof TensorReference) {
			const bytes = this.file.readTensor(value);
			if (bytes instanceof Uint8Array) return bytes;
		}
		if (value instanceof PythonObject) {
			// Instances with slots have the pair (dict, slots) as state.
			const places = value.state instanceof Tuple ? value.state.items : [value.state];
			const state = Object.assign({}, ...places.map((place) => (place instanceof Map ? this.#entries(place) : {})));
			const own = value.entries === null ? {} : this.#entries(value.entries);
			return { __type__: value.type.name, ...state, ...own };
		}
		throw new UserError(`${this.path} holds a value that a loader state has no place for.`);
	}

	#entries(map: ReadonlyMap<unknown, unknown>): EnergonRecord {
		return Object.fromEntries([...map].map(([key, item]) => [String(key), this.convert(item)]));
	}

	#words({ data, dtype }: NumpyArray): Uint32Array {
		if (dtype?.code !== "u4" || dtype.bigEndian || !(data instanceof Uint8Array)) {
			throw new UserError(`${this.path} holds an array that is not of 32-bit words.`);
		}
		return new Uint32Array(data.slice().buffer);
	}
}
