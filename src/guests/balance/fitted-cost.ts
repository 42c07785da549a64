/**
 * The time of an image, fitted from those that microbatches took: a p² + b p + c of its p patches (docs/spec/runtime.md §2.4). All ranks
 * of the encoder have the same sums, so the same costs.
 */
import type { PatchGrid } from "../../models/tower.ts";
import type { Group } from "../../parallel/index.ts";

/** a, b and c, none below 0, in milliseconds of patches in thousands. */
export type FittedCost = number[];

const thousand = 1000;
const terms = 3;
/** Numbers of the sums: of products of two terms, then of terms with times. */
const width = terms * terms + terms;

/** Cost of an image; above 0. */
export function fittedCost(fit: FittedCost, { rows, columns }: PatchGrid): number {
	const patches = (rows * columns) / thousand;
	return Math.max(fit[0]! * patches ** 2 + fit[1]! * patches + fit[2]!, 1e-9);
}

/** Sums over microbatches of what the fit needs. */
export class MeasuredTimes {
	readonly #sums = new Float64Array(width);

	/** A microbatch of these images that took so many milliseconds. */
	add(grids: readonly PatchGrid[], milliseconds: number): void {
		const of = [0, 0, grids.length];
		for (const { rows, columns } of grids) {
			const patches = (rows * columns) / thousand;
			of[0]! += patches ** 2;
			of[1]! += patches;
		}
		for (const [row, x] of of.entries()) {
			for (const [column, y] of of.entries()) this.#sums[row * terms + column]! += x * y;
			this.#sums[terms * terms + row]! += x * milliseconds;
		}
	}

	/**
	 * The fit of all lanes' times: that of the first rank of every lane, so that ranks which cut a lane agree. null: no image was
	 * measured. Collective over both groups.
	 */
	fit(lanes: Group, cut: Group): FittedCost | null {
		const [own] = cut.exchange(words(this.#sums));
		const sums = new Float64Array(width);
		for (const one of lanes.exchange(own!)) for (const [i, value] of numbers(one).entries()) sums[i]! += value;
		return leastSquares(sums);
	}
}

const words = (values: Float64Array) => new Int32Array(values.slice().buffer);
const numbers = (values: Int32Array) => new Float64Array(values.slice().buffer);

/** Of all choices of terms whose factors come out at 0 or above that of the least squares. */
function leastSquares(sums: Float64Array): FittedCost | null {
	let best: { readonly fit: number[]; readonly gain: number } | null = null;
	for (let choice = 1; choice < 2 ** terms; choice++) {
		const chosen = [0, 1, 2].filter((term) => (choice >> term) & 1);
		const factors = solve(
			chosen.map((row) => chosen.map((column) => sums[row * terms + column]!)),
			chosen.map((row) => sums[terms * terms + row]!),
		);
		if (factors === null || factors.some((factor) => factor < 0)) continue;
		// The squares fall by the factors' product with the terms' sums with times.
		const gain = chosen.reduce((sum, term, i) => sum + factors[i]! * sums[terms * terms + term]!, 0);
		const fit = [0, 1, 2].map((term) => factors[chosen.indexOf(term)] ?? 0);
		if (gain > (best?.gain ?? 0)) best = { fit, gain };
	}
	return best?.fit ?? null;
}

/** By elimination with the largest pivot; null: there is no one solution. */
function solve(matrix: readonly (readonly number[])[], right: readonly number[]): number[] | null {
	const rows = matrix.map((row, i) => [...row, right[i]!]);
	const scale = Math.max(...matrix.flat().map(Math.abs));
	for (let at = 0; at < rows.length; at++) {
		const pivot = rows.slice(at).reduce((most, row) => (Math.abs(row[at]!) > Math.abs(most[at]!) ? row : most));
		if (!(Math.abs(pivot[at]!) > 1e-9 * scale)) return null;
		rows.splice(rows.indexOf(pivot), 1);
		rows.splice(at, 0, pivot);
		for (const [other, row] of rows.entries()) {
			if (other === at) continue;
			const factor = row[at]! / pivot[at]!;
			for (let column = at; column < row.length; column++) row[column]! -= factor * pivot[column]!;
		}
	}
	return rows.map((row, i) => row.at(-1)! / row[i]!);
}
