import { writeSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { readTokenRows } from "../../../src/train/feed/sources.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";
import { withFolder } from "../with-file.ts";

const seed = (dtype: "I32" | "I64") =>
	withFolder((folder) => {
		const values = Array.from({ length: 12 }, (_, i) => 20 * i);
		const data = () => (dtype === "I32" ? Int32Array.from(values) : BigInt64Array.from(values, BigInt));
		writeSafetensors(`${folder}/tokens`, [{ name: "tokens", dtype, shape: [3, 4], data }]);
		return "tokens";
	});

export default {
	about: "rows of tokens in a safetensors file",
	open: () => {
		const file = new FileInput(".safetensors");
		return {
			seeds: [seed("I32"), seed("I64")],
			dictionary: ['"I64"', '"I32"', "[3,4]", "data_offsets", new Uint8Array(8).fill(255)],
			parse: (bytes) => readTokenRows(file.with(bytes), 3, 256),
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
