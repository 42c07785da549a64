import { parseSafetensors, streamSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { MemoryFile } from "../memory-file.ts";
import { type FuzzParser, inputName } from "../parser.ts";

/** The bytes of a small file. */
function example(metadata: Record<string, string>): Uint8Array {
	const parts: Uint8Array[] = [];
	const file = { path: inputName, expect: () => {}, write: (bytes: Uint8Array) => void parts.push(bytes.slice()) };
	streamSafetensors(
		file,
		[
			{ name: "w", dtype: "F32", shape: [2, 3], data: () => new Float32Array(6) },
			{ name: "b", dtype: "BF16", shape: [5], data: () => new Uint16Array(5) },
			{ name: "empty", dtype: "I64", shape: [0, 4], data: () => new BigInt64Array(0) },
		],
		metadata,
	);
	return new Uint8Array(Buffer.concat(parts));
}

/** The header's length is again where the data begin. */
function repair(bytes: Uint8Array): Uint8Array {
	const end = bytes.lastIndexOf(0x7d);
	if (end >= 8) new DataView(bytes.buffer, bytes.byteOffset).setBigUint64(0, BigInt(end + 1 - 8), true);
	return bytes;
}

export default {
	about: "header and data of a safetensors file",
	open: () => ({
		seeds: [example({ format: "pt" }), example({})],
		dictionary: [
			'"dtype":',
			'"F8_E4M3"',
			'"F4"',
			'"shape":',
			'"data_offsets":',
			'"__metadata__":',
			"[0,0]",
			":{",
			"},",
		],
		repair,
		parse: (bytes) => {
			const file = parseSafetensors(new MemoryFile(bytes));
			let total = 0;
			for (const name of file.tensors.keys()) total += file.read(name).byteLength;
			if (total > bytes.length) throw new Error(`${total} bytes were read of ${bytes.length}.`);
		},
	}),
} satisfies FuzzParser;
