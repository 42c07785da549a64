/** Reads tables of flatbuffers, the format of Arrow's message descriptions. Offsets outside of the buffer throw a RangeError. */

/** Entries of the longest list. */
const LONGEST_LIST = 100_000;

export class FlatTable {
	readonly #fields: number;
	readonly #size: number;

	constructor(
		readonly view: DataView,
		private readonly at: number,
	) {
		this.#fields = at - view.getInt32(at, true);
		this.#size = view.getUint16(this.#fields, true);
	}

	/** The root table of a buffer. */
	static root(bytes: Uint8Array): FlatTable {
		const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
		return new FlatTable(view, view.getUint32(0, true));
	}

	/** Offset of a field; null if it has its default value. */
	#place(field: number): number | null {
		const entry = 4 + 2 * field;
		if (entry + 2 > this.#size) return null;
		const offset = this.view.getUint16(this.#fields + entry, true);
		return offset === 0 ? null : this.at + offset;
	}

	uint8(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : this.view.getUint8(place);
	}

	int16(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : this.view.getInt16(place, true);
	}

	int32(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : this.view.getInt32(place, true);
	}

	/** A 64-bit count or offset. */
	count(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : countAt(this.view, place);
	}

	has(field: number): boolean {
		return this.#place(field) !== null;
	}

	table(field: number): FlatTable | null {
		const place = this.#place(field);
		return place === null ? null : new FlatTable(this.view, place + this.view.getUint32(place, true));
	}

	string(field: number): string {
		const { begin, length } = this.#list(field, 1, Number.MAX_SAFE_INTEGER);
		return Buffer.from(this.view.buffer, this.view.byteOffset + begin, length).toString("utf8");
	}

	tables(field: number): FlatTable[] {
		const { begin, length } = this.#list(field, 4, LONGEST_LIST);
		return Array.from({ length }, (_, i) => {
			const place = begin + 4 * i;
			return new FlatTable(this.view, place + this.view.getUint32(place, true));
		});
	}

	/** A list of pairs of 64-bit counts. */
	pairs(field: number): (readonly [number, number])[] {
		const { begin, length } = this.#list(field, 16, LONGEST_LIST);
		return Array.from({ length }, (_, i) => [
			countAt(this.view, begin + 16 * i),
			countAt(this.view, begin + 16 * i + 8),
		]);
	}

	#list(field: number, bytes: number, most: number): { readonly begin: number; readonly length: number } {
		const place = this.#place(field);
		if (place === null) return { begin: 0, length: 0 };
		const head = place + this.view.getUint32(place, true);
		const length = this.view.getUint32(head, true);
		if (length > most || head + 4 + length * bytes > this.view.byteLength) {
			throw new RangeError(`a list has ${length} entries`);
		}
		return { begin: head + 4, length };
	}
}

function countAt(view: DataView, place: number): number {
	const value = Number(view.getBigInt64(place, true));
	if (!(Number.isSafeInteger(value) && value >= 0)) throw new RangeError(`a count is ${value}`);
	return value;
}
