/** Blocks of remote files on a local disk: bounded, checked when they are read, shared by processes. */
import { mkdirSync, readdirSync, readFileSync, renameSync, rmSync, statSync, utimesSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { RemoteVersion } from "./remote-options.ts";

/** Bytes of the checksum behind a block. */
const CHECKSUM = 8;
/** Blocks written between two looks at what other processes wrote. */
const LOOK = 64;

/** File of a block. */
export function blockPath(folder: string, { url, size, cacheName }: RemoteVersion, block: number): string {
	const name = new Bun.CryptoHasher("sha256").update(JSON.stringify([url, size, cacheName])).digest("hex");
	return join(folder, `${name.slice(0, 40)}-${block}`);
}

/** A block's bytes, or null when it is not there or damaged. */
export function readBlock(path: string, length: number): Uint8Array | null {
	let bytes: Uint8Array;
	try {
		bytes = readFileSync(path);
		const now = new Date();
		utimesSync(path, now, now);
	} catch {
		return null;
	}
	const content = bytes.subarray(0, -CHECKSUM);
	if (content.length !== length || !Buffer.from(bytes.subarray(-CHECKSUM)).equals(checksum(content))) {
		rmSync(path, { force: true });
		return null;
	}
	return content;
}

function checksum(bytes: Uint8Array): Buffer {
	const sum = Buffer.alloc(CHECKSUM);
	sum.writeBigUInt64LE(Bun.hash.wyhash(bytes));
	return sum;
}

/** Writes blocks and removes those unused for longest. */
export class BlockWriter {
	#bytes = 0;
	#sinceLook = LOOK;

	constructor(
		private readonly folder: string,
		private readonly limit: number,
	) {
		mkdirSync(folder, { recursive: true });
	}

	write(path: string, bytes: Uint8Array): void {
		const unfinished = `${path}.${process.pid}.${crypto.randomUUID()}.part`;
		writeFileSync(unfinished, Buffer.concat([bytes, checksum(bytes)]));
		renameSync(unfinished, path);
		this.#bytes += bytes.length + CHECKSUM;
		this.#sinceLook++;
		if (this.#bytes > this.limit || this.#sinceLook >= LOOK) this.#shrink(path);
	}

	/** Counts what is there; removes the blocks unused for longest beyond the limit, but never the one just written. */
	#shrink(newest: string): void {
		this.#sinceLook = 0;
		const files = readdirSync(this.folder).flatMap((name) => {
			const path = join(this.folder, name);
			const stat = statSync(path, { throwIfNoEntry: false });
			return stat ? [{ path, size: stat.size, used: stat.mtimeMs }] : [];
		});
		this.#bytes = files.reduce((sum, { size }) => sum + size, 0);
		files.sort((a, b) => a.used - b.used);
		for (const { path, size } of files) {
			if (this.#bytes <= this.limit) break;
			if (path === newest) continue;
			rmSync(path, { force: true });
			this.#bytes -= size;
		}
	}
}
