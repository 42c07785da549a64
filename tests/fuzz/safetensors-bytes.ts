/** Small safetensors files in memory. */
import { streamSafetensors } from "../../src/checkpoint/safetensors.ts";
import { inputName } from "./parser.ts";

/** The bytes of a file of float32 zeros. */
export function safetensorsBytes(
	shapes: Readonly<Record<string, readonly number[]>>,
	metadata: Readonly<Record<string, string>> = {},
): Uint8Array {
	const parts: Uint8Array[] = [];
	const file = { path: inputName, expect: () => {}, write: (bytes: Uint8Array) => void parts.push(bytes.slice()) };
	const entries = Object.entries(shapes).map(([name, shape]) => ({
		name,
		dtype: "F32" as const,
		shape,
		data: () => new Float32Array(shape.reduce((product, size) => product * size, 1)),
	}));
	streamSafetensors(file, entries, metadata);
	return new Uint8Array(Buffer.concat(parts));
}

/** The header's length is again where its last brace is. */
export function withHeaderLength(bytes: Uint8Array): Uint8Array {
	const end = bytes.lastIndexOf(0x7d);
	if (end >= 8) new DataView(bytes.buffer, bytes.byteOffset).setBigUint64(0, BigInt(end + 1 - 8), true);
	return bytes;
}
