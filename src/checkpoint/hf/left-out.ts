/**
 * Tensors of a Hugging Face folder that have no place in the model and do not change what it computes. Any other tensor
 * without a place is an error that names it.
 */
import { UserError } from "../../native/errors.ts";
import { clipStatistics } from "../../native/images.ts";
import { isFloatDtype } from "../dtype.ts";
import { decodeFloats } from "../floats.ts";
import { readTensor, type TensorStore, typeOf } from "../store.ts";

interface LeftOut {
	readonly name: RegExp;
	/** Why nothing is lost; completes "NAME is left out: …". */
	readonly reason: string;
	/** What its values must be for that to hold. */
	readonly values?: readonly number[];
}

const table: readonly LeftOut[] = [
	{
		name: /(^|\.)summary_idxs$/,
		reason: "it says which class tokens make RADIO's own summary, and the model uses all of them",
	},
	{
		name: /(^|\.)input_conditioner\.norm_mean$/,
		reason: "images are normalised by this mean as they are read",
		values: clipStatistics.mean,
	},
	{
		name: /(^|\.)input_conditioner\.norm_std$/,
		reason: "images are normalised by this deviation as they are read",
		values: clipStatistics.deviation,
	},
];
/** A value as bf16 may be this far from it, relatively. */
const ROUNDING = 2 ** -8;

/** Whether a tensor is one that may be left out. */
export function isLeftOut(name: string): boolean {
	return table.some((entry) => entry.name.test(name));
}

/** A sentence for each tensor of the store that is left out; values that would change the model are an error. */
export function describeLeftOut(store: TensorStore): string[] {
	return [...store.tensors.keys()].flatMap((name) => {
		const entry = table.find((candidate) => candidate.name.test(name));
		if (!entry) return [];
		if (entry.values) requireValues(store, name, entry.values);
		return [`${store.path}: ${name} is left out: ${entry.reason}.`];
	});
}

function requireValues(store: TensorStore, name: string, expected: readonly number[]): void {
	const { dtype, shape } = typeOf(store, name);
	const size = shape.reduce((product, n) => product * n, 1);
	if (size !== expected.length || !isFloatDtype(dtype)) {
		throw new UserError(`${store.path}: ${name} is [${shape}] ${dtype}, not a number a channel.`);
	}
	const read = readTensor(store, name);
	const bytes = new Uint8Array(read.buffer as ArrayBuffer, read.byteOffset, read.byteLength);
	const found = Array.from(decodeFloats(dtype, bytes));
	if (found.every((value, i) => Math.abs(value - expected[i]!) <= ROUNDING * expected[i]!)) return;
	throw new UserError(
		`${store.path}: ${name} is [${found.join(", ")}], and images are normalised by [${expected.join(", ")}]: its tower would see other values than it was trained on.`,
	);
}
