/** An input as a file in memory. */

import { UserError } from "../../src/system/errors.ts";
import type { ByteSource } from "../../src/system/input-file.ts";
import { inputName } from "./parser.ts";

export class MemoryFile implements ByteSource {
	readonly path = inputName;

	constructor(readonly bytes: Uint8Array) {}

	get size(): number {
		return this.bytes.length;
	}

	read(position: number, length: number): Uint8Array {
		if (!(position >= 0 && length >= 0 && position + length <= this.size)) {
			throw new UserError(`${inputName} is truncated.`);
		}
		return this.bytes.slice(position, position + length);
	}

	readInto(position: number, into: Uint8Array): void {
		into.set(this.read(position, into.length));
	}
}
