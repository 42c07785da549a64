import { crc32 } from "node:zlib";
import { tensorGlobals } from "../../../src/checkpoint/pickle/allowed.ts";
import { TorchArchive, ZipArchive } from "../../../src/checkpoint/pickle/archive.ts";
import { TensorReference } from "../../../src/checkpoint/pickle/values.ts";
import { writeTensor } from "../../../src/checkpoint/pickle/writer.ts";
import { MemoryFile } from "../memory-file.ts";
import { type FuzzParser, inputName } from "../parser.ts";
import { withFile } from "../with-file.ts";

/** Every record's checksum is that of its bytes again. */
function repair(bytes: Uint8Array): Uint8Array {
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
	for (let at = 0; at + 46 <= bytes.length; at++) {
		if (view.getUint32(at, true) !== 0x02014b50) continue;
		const [size, header] = [view.getUint32(at + 24, true), view.getUint32(at + 42, true)];
		if (header + 30 > bytes.length) continue;
		const begin = header + 30 + view.getUint16(header + 26, true) + view.getUint16(header + 28, true);
		if (begin + size <= bytes.length) view.setUint32(at + 16, crc32(bytes.subarray(begin, begin + size)), true);
	}
	return bytes;
}

export default {
	about: "a tensor of torch.save: zip archive, pickle and storage",
	open: () => ({
		seeds: [
			withFile((file) => writeTensor(file, "F32", [2, 3], [new Uint8Array(24)])),
			withFile((file) => writeTensor(file, "BF16", [], [new Uint8Array(2)])),
		],
		dictionary: [
			"PK\x01\x02",
			"PK\x03\x04",
			"PK\x05\x06",
			"PK\x06\x06",
			"PK\x06\x07",
			"data.pkl",
			"data/0",
			"byteorder",
		],
		repair,
		parse: (bytes) => {
			const archive = new TorchArchive(ZipArchive.open(new MemoryFile(bytes)));
			const value = archive.load(tensorGlobals, 4096);
			if (!(value instanceof TensorReference)) return;
			const { byteLength } = archive.read(value);
			if (byteLength > 64 * bytes.length + 16384)
				throw new Error(`${byteLength} bytes of ${bytes.length}: ${inputName}`);
		},
	}),
} satisfies FuzzParser;
