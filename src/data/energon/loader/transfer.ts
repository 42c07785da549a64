/** Handing outputs to another thread without copying their arrays. */

/** Buffers an item owns alone: whole, and not shared by two arrays. Arrays that are part of a larger buffer are copied. */
export function transferable(item: unknown): ArrayBuffer[] {
	const owners = new Map<ArrayBuffer, number>();
	visit(item, (array) => {
		const { buffer } = array;
		if (buffer instanceof ArrayBuffer)
			owners.set(buffer, array.byteLength === buffer.byteLength ? (owners.get(buffer) ?? 0) + 1 : 2);
	});
	return [...owners].flatMap(([buffer, count]) => (count === 1 ? [buffer] : []));
}

/** Copies arrays that are a small part of a large buffer, such as a mapped file, so that the buffer stays behind. */
export function detach(value: unknown): void {
	if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return;
	const fields = value as Record<string, unknown>;
	for (const [name, item] of Object.entries(fields)) {
		if (item instanceof Uint8Array && item.byteLength !== item.buffer.byteLength) fields[name] = Uint8Array.from(item);
		else if (!(Array.isArray(item) && typeof item[0] === "number")) detach(item);
	}
}

/** Bytes of all arrays and texts of an item, about what it takes in memory. */
export function byteLength(item: unknown): number {
	let bytes = 0;
	visit(item, (array) => {
		bytes += array.byteLength;
	});
	return bytes + 1024;
}

function visit(value: unknown, onArray: (array: ArrayBufferView) => void): void {
	if (ArrayBuffer.isView(value)) onArray(value);
	else if (Array.isArray(value)) {
		if (typeof value[0] === "number") return;
		for (const item of value) visit(item, onArray);
	} else if (value !== null && typeof value === "object") {
		for (const item of Object.values(value)) visit(item, onArray);
	}
}
