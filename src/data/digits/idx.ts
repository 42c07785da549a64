/** The IDX format of the MNIST files: a big-endian header, then bytes. */
import { readFileSync } from "node:fs";
import { UserError } from "../../native/errors.ts";

export interface IdxBytes {
	/** Sizes of all dimensions, the slowest first. */
	readonly shape: readonly number[];
	readonly values: Uint8Array;
}

/** Unsigned bytes, the element type of the MNIST files. */
const unsignedByte = 0x08;

/** Reads a file of unsigned bytes; `dimensions`: how many it must have. */
export function readIdx(path: string, dimensions: number): IdxBytes {
	let bytes: Uint8Array;
	try {
		bytes = readFileSync(path);
	} catch (error) {
		throw new UserError(
			`${path} cannot be read (${(error as NodeJS.ErrnoException).code}); the digits come with \`npm run setup\`, or name a folder of the four MNIST files in data-path.`,
		);
	}
	const header = 4 + 4 * dimensions;
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
	const magic = bytes.length >= header ? view.getUint32(0) : 0;
	if (magic !== unsignedByte * 256 + dimensions) {
		throw new UserError(`${path} is no IDX file of unsigned bytes in ${dimensions} dimensions.`);
	}
	const shape = Array.from({ length: dimensions }, (_, index) => view.getUint32(4 + 4 * index));
	const values = bytes.subarray(header);
	const wanted = shape.reduce((product, size) => product * size, 1);
	if (values.length !== wanted) {
		throw new UserError(`${path} holds ${values.length} values; its header says ${shape.join(" × ")}.`);
	}
	return { shape, values };
}
