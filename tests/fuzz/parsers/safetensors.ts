import { parseSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { MemoryFile } from "../memory-file.ts";
import type { FuzzParser } from "../parser.ts";
import { safetensorsBytes, withHeaderLength } from "../safetensors-bytes.ts";

const shapes = { w: [2, 3], b: [5], scalar: [], empty: [0, 4] };

export default {
	about: "header and data of a safetensors file",
	open: () => ({
		seeds: [safetensorsBytes(shapes, { format: "pt" }), safetensorsBytes(shapes)],
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
		repair: withHeaderLength,
		parse: (bytes) => {
			const file = parseSafetensors(new MemoryFile(bytes));
			let total = 0;
			for (const name of file.tensors.keys()) total += file.read(name).byteLength;
			if (total > bytes.length) throw new Error(`${total} bytes were read of ${bytes.length}.`);
		},
	}),
} satisfies FuzzParser;
