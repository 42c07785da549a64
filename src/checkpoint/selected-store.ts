/**
 * Tensors made of some rows and columns of other tensors, in any order: slices and permutations. Values are read only when they
 * are asked for, whole rows of the source at a time.
 */
import { dtypes, elementCount } from "./dtype.ts";
import { type TensorStore, type TensorType, typeOf } from "./store.ts";

/** Rows and columns that make up a tensor. */
export interface Selection {
	readonly source: string;
	/** Places along the first axis; null: all in order. */
	readonly rows: Uint32Array | null;
	/** Places along the second axis of a matrix; null: all in order. */
	readonly columns: Uint32Array | null;
}

/** Bytes of the source that are read together where columns are selected. */
const LARGEST_SPAN = 2 ** 22;

/** Owns `source`. Rows and columns that a tensor does not have are a RangeError. */
export class SelectedStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;

	constructor(
		readonly source: TensorStore,
		private readonly selections: ReadonlyMap<string, Selection>,
	) {
		this.tensors = new Map([...selections].map(([name, selection]) => [name, selectedType(source, selection)]));
	}

	get path(): string {
		return this.source.path;
	}

	originsOf(name: string): { store: TensorStore; name: string }[] {
		return [{ store: this.source, name: this.selections.get(name)!.source }];
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const { source, rows, columns } = this.selections.get(name)!;
		const { dtype, shape } = typeOf(this.source, source);
		const bytes = dtypes[dtype].bits / 8;
		const sourceWidth = elementCount(shape.slice(1))! * bytes;
		const width = columns === null ? sourceWidth : columns.length * bytes;
		const rowCount = rows?.length ?? shape[0] ?? 1;
		for (let done = 0; done < into.byteLength; ) {
			const row = Math.floor((offset + done) / width);
			const skip = offset + done - row * width;
			const first = rows === null ? row : rows[row]!;
			const most = Math.min(Math.ceil((skip + into.byteLength - done) / width), rowCount - row);
			let count = 1;
			while (count < most && (rows === null || rows[row + count] === first + count)) {
				if (columns !== null && (count + 1) * sourceWidth > LARGEST_SPAN) break;
				count++;
			}
			const target = into.subarray(done, Math.min(into.byteLength, done + count * width - skip));
			if (columns === null) this.source.readInto(source, first * sourceWidth + skip, target);
			else {
				const span = new Uint8Array(count * sourceWidth);
				this.source.readInto(source, first * sourceWidth, span);
				const gathered = gather(span, columns, { count, sourceWidth, bytes });
				target.set(gathered.subarray(skip, skip + target.byteLength));
			}
			done += target.byteLength;
		}
	}

	[Symbol.dispose](): void {
		this.source[Symbol.dispose]();
	}
}

function selectedType(store: TensorStore, { source, rows, columns }: Selection): TensorType {
	const { dtype, shape } = typeOf(store, source);
	if (columns !== null && shape.length !== 2) throw new RangeError(`${source} of shape [${shape}] has no columns.`);
	const most = Math.max(...[rows, columns].map((some, axis) => (largest(some) + 1) / (shape[axis] ?? 1)));
	if (most > 1) throw new RangeError(`A selection reaches past the shape [${shape}] of ${source}.`);
	const selected = shape.map((size, axis) => [rows, columns][axis]?.length ?? size);
	return { dtype, shape: selected };
}

function largest(places: Uint32Array | null): number {
	return places === null ? -1 : places.reduce((most, place) => Math.max(most, place), 0);
}

/** Columns of `count` rows side by side. */
function gather(
	span: Uint8Array,
	columns: Uint32Array,
	{ count, sourceWidth, bytes }: { readonly count: number; readonly sourceWidth: number; readonly bytes: number },
): Uint8Array {
	const gathered = new Uint8Array(count * columns.length * bytes);
	const runs = runsOf(columns);
	for (let row = 0; row < count; row++) {
		const [from, to] = [row * sourceWidth, row * columns.length * bytes];
		for (const { begin, at, length } of runs) {
			const start = from + begin * bytes;
			gathered.set(span.subarray(start, start + length * bytes), to + at * bytes);
		}
	}
	return gathered;
}

/** Columns that follow each other in source and target. */
function runsOf(columns: Uint32Array): { readonly begin: number; readonly at: number; readonly length: number }[] {
	const runs: { begin: number; at: number; length: number }[] = [];
	for (const [at, column] of columns.entries()) {
		const last = runs.at(-1);
		if (last && last.begin + last.length === column) last.length++;
		else runs.push({ begin: column, at, length: 1 });
	}
	return runs;
}
