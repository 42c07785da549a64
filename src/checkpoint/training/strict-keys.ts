/**
 * Strict keys (docs/spec/checkpoint.md §6): the tensors that all ranks want together are exactly those of the
 * checkpoint.
 */
import { exchangeTexts, type Group } from "../../parallel/index.ts";
import { compareTensors, requireMatch } from "../mapping.ts";
import type { TensorStore, TensorType } from "../store.ts";
import { isOptimizerName, isVocabulary } from "./names.ts";
import { type StoredTensors, shapesOf } from "./tensors.ts";

/**
 * Throws the same UserError on every rank of `world` unless the checkpoint holds exactly the tensors of all ranks;
 * without `optimizer` its optimizer state is not looked at. Every rank calls this together.
 */
export function requireTensors(tensors: StoredTensors, store: TensorStore, optimizer: boolean, world: Group): void {
	const own = JSON.stringify([...shapesOf(tensors, optimizer)]);
	const wanted = new Map<string, readonly number[]>(
		exchangeTexts(world, own).flatMap((text) => JSON.parse(text) as [string, number[]][]),
	);
	const there = new Map<string, TensorType>();
	for (const [name, { dtype, shape }] of store.tensors) {
		if (!optimizer && isOptimizerName(name)) continue;
		const expected = wanted.get(name);
		const padded = expected !== undefined && isPadded(name, shape, expected);
		there.set(name, { dtype, shape: padded ? expected : shape });
	}
	requireMatch(store.path, compareTensors(there, wanted));
}

/** A checkpoint may hold more rows of a vocabulary than there are tokens. */
function isPadded(name: string, stored: readonly number[], wanted: readonly number[]): boolean {
	const vocabulary = name.replace(/^optimizer\.state\.[a-z_]+\./, "");
	const rest = (shape: readonly number[]) => shape.slice(1).join();
	return isVocabulary(vocabulary) && rest(stored) === rest(wanted) && stored[0]! > wanted[0]!;
}
