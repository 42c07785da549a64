/** Packs and unpacks C structs by the field lists of abi.ts, with C's alignment rules (x86-64, little endian). */

/** C type of a struct field. "ptr" is any pointer; ["char", n] an array inside the struct. */
export type ScalarType = "ptr" | "i64" | "i32" | "f32" | "f64";
export type FieldType = ScalarType | readonly ["char" | "i64", number];
export type Fields = Readonly<Record<string, FieldType>>;

interface Field {
	readonly name: string;
	readonly type: FieldType;
	readonly offset: number;
}

export interface Layout {
	readonly fields: readonly Field[];
	readonly bytes: number;
}

const sizes = { ptr: 8, i64: 8, f64: 8, i32: 4, f32: 4, char: 1 } as const;

/** Offsets and size a C compiler gives the struct. */
export function layoutOf(fields: Fields): Layout {
	let offset = 0;
	let alignment = 1;
	const placed = Object.entries(fields).map(([name, type]) => {
		const [element, count] = typeof type === "string" ? [type, 1] : type;
		const size = sizes[element];
		alignment = Math.max(alignment, size);
		offset = Math.ceil(offset / size) * size;
		const field = { name, type, offset };
		offset += size * count;
		return field;
	});
	return { fields: placed, bytes: Math.ceil(offset / alignment) * alignment };
}

/** Writes an integer that JavaScript holds exactly, or a BigInt, as int64. */
export function writeInt64(view: DataView, offset: number, value: number | bigint): void {
	if (typeof value === "bigint") {
		view.setBigInt64(offset, BigInt.asIntN(64, value), true);
		return;
	}
	view.setUint32(offset, value >>> 0, true);
	view.setInt32(offset + 4, Math.floor(value / 4294967296), true);
}

/** Fills a struct of pointers and integers with what `value` gives for each field. */
export function writeStruct(bytes: Uint8Array, layout: Layout, value: (field: string) => number): void {
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
	for (const { name, type, offset } of layout.fields) {
		if (type === "i32") view.setInt32(offset, value(name), true);
		else writeInt64(view, offset, value(name));
	}
}

/** Reads a struct the library filled in: numbers, strings (char arrays) and arrays of numbers. */
export function readStruct(bytes: Uint8Array, layout: Layout): Record<string, number | string | number[]> {
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
	const scalar = (type: ScalarType, offset: number): number => {
		switch (type) {
			case "i32":
				return view.getInt32(offset, true);
			case "f32":
				return view.getFloat32(offset, true);
			case "f64":
				return view.getFloat64(offset, true);
			default:
				return Number(view.getBigInt64(offset, true));
		}
	};
	const result: Record<string, number | string | number[]> = {};
	for (const { name, type, offset } of layout.fields) {
		if (typeof type === "string") {
			result[name] = scalar(type, offset);
		} else if (type[0] === "char") {
			const text = bytes.subarray(offset, offset + type[1]);
			const end = text.indexOf(0);
			result[name] = new TextDecoder().decode(end < 0 ? text : text.subarray(0, end));
		} else {
			result[name] = Array.from({ length: type[1] }, (_, i) => scalar("i64", offset + 8 * i));
		}
	}
	return result;
}

export function zeroTerminated(text: string): Buffer {
	return Buffer.from(`${text.replaceAll("\0", "")}\0`);
}
