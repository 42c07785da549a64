/** Transfers outputs to another thread: views of larger buffers, such as mapped files, are copied into one new buffer. */

/** The buffers that a single array of an item spans, which can be transferred; other arrays are copied. */
export function transferable(item: unknown): ArrayBuffer[] {
	const owners = new Map<ArrayBuffer, number>();
	visit(item, (array) => {
		const { buffer } = array;
		if (buffer instanceof ArrayBuffer)
			owners.set(buffer, array.byteLength === buffer.byteLength ? (owners.get(buffer) ?? 0) + 1 : 2);
	});
	return [...owners].flatMap(([buffer, count]) => (count === 1 ? [buffer] : []));
}

/** A property whose array is a view of a larger buffer, such as a mapped file. */
interface Part {
	readonly owner: Record<string, unknown>;
	readonly name: string;
	readonly bytes: Uint8Array;
}

/**
 * Copies arrays that are views of larger buffers into one new buffer, so that the larger buffers are not transferred. Returns
 * the new buffer, or null without such arrays.
 */
export function detach(value: unknown): ArrayBuffer | null {
	const parts: Part[] = [];
	collect(value, parts);
	if (parts.length === 0) return null;
	const buffer = new ArrayBuffer(parts.reduce((sum, { bytes }) => sum + bytes.byteLength, 0));
	let at = 0;
	for (const { owner, name, bytes } of parts) {
		const copy = new Uint8Array(buffer, at, bytes.byteLength);
		copy.set(bytes);
		owner[name] = copy;
		at += bytes.byteLength;
	}
	return buffer;
}

function collect(value: unknown, parts: Part[]): void {
	if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return;
	if (Array.isArray(value) && typeof value[0] === "number") return;
	const owner = value as Record<string, unknown>;
	for (const name of Object.keys(owner)) {
		const item = owner[name];
		if (item instanceof Uint8Array && item.byteLength !== item.buffer.byteLength)
			parts.push({ owner, name, bytes: item });
		else if (typeof item === "object") collect(item, parts);
	}
}

/** Bytes of all arrays and strings of an item, approximately its size in memory. */
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
