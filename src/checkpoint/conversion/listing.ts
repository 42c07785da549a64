/** Lists the steps of a conversion, tensor by tensor, and their results. */
import { UserError } from "../../system/errors.ts";
import { firstNotFinite } from "../cast-floats.ts";
import { bytesOfType, readPieces, type TensorStore, typeOf } from "../store.ts";

export interface PlanLine {
	/** Tensors as the source stores them. */
	readonly from: readonly string[];
	readonly to: string;
	readonly dtype: string;
	readonly shape: readonly number[];
	readonly bytes: number;
}

/** Every tensor of the target with the stored tensors it is made of. */
export function planLines(target: TensorStore): PlanLine[] {
	return [...target.tensors].map(([name, type]) => ({
		from: [...originsOf(target, name)],
		to: name,
		dtype: type.dtype,
		shape: type.shape,
		bytes: bytesOfType(type),
	}));
}

/** Follows mappings down to the stored tensors. */
function originsOf(store: TensorStore, name: string): Set<string> {
	if (!store.originsOf) return new Set([name]);
	return new Set(store.originsOf(name).flatMap((origin) => [...originsOf(origin.store, origin.name)]));
}

/** One line of the plan as text; many sources are abbreviated. */
export function formatPlanLine({ from, to, dtype, shape }: PlanLine): string {
	const sources =
		from.length === 0
			? "new values"
			: from.length <= 3
				? from.join(" + ")
				: `${from.length} tensors: ${from[0]} … ${from.at(-1)}`;
	return `${to}  [${shape.join(", ")}] ${dtype}  ← ${sources}`;
}

/**
 * Compares tensors of two stores byte by byte; every tensor of `expected` must be in `actual`. Throws on the first
 * difference and names it. Returns the number of tensors, and the names of those with infinite values or NaN.
 */
export function requireEqual(
	expected: TensorStore,
	actual: TensorStore,
	onBytes?: (bytes: number) => void,
): { readonly count: number; readonly notFinite: readonly string[] } {
	const notFinite: string[] = [];
	for (const [name, type] of expected.tensors) {
		const other = typeOf(actual, name);
		if (other.dtype !== type.dtype || other.shape.join() !== type.shape.join()) {
			throw new UserError(
				`${actual.path}: ${name} is [${other.shape}] ${other.dtype}, expected [${type.shape}] ${type.dtype}.`,
			);
		}
		const pieces = readPieces(actual, name);
		for (const piece of readPieces(expected, name)) {
			const read = pieces.next().value;
			if (!read || Buffer.compare(piece, read) !== 0) {
				throw new UserError(`${actual.path}: ${name} differs from the source's.`);
			}
			if (notFinite.at(-1) !== name && firstNotFinite(type.dtype, piece) >= 0) notFinite.push(name);
			onBytes?.(piece.byteLength);
		}
	}
	const surplus = [...actual.tensors.keys()].find((name) => !expected.tensors.has(name));
	if (surplus !== undefined) throw new UserError(`${actual.path} has a tensor ${surplus} that was not to be written.`);
	return { count: expected.tensors.size, notFinite };
}
