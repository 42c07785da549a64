/** Writes a shard: samples are appended to `NAME.tar.part`, which becomes `NAME.tar` when the shard is finished. */
import {
	closeSync,
	existsSync,
	fstatSync,
	fsyncSync,
	ftruncateSync,
	openSync,
	readSync,
	renameSync,
	rmSync,
	writeSync,
} from "node:fs";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
import { indexShard } from "../energon/prepare/shard-index.ts";
import { PythonRandom } from "../energon/random/python-random.ts";
import { LocalFile } from "../energon/storage/local.ts";

export type SamplePart = readonly [extension: string, content: Uint8Array];

/** State of a shard when the journal was written. */
export interface OpenShard {
	readonly number: number;
	readonly bytes: number;
	readonly samples: number;
}

/** Bytes that are collected before a write. */
const GATHERED = 2 ** 20;

export class ShardFile {
	readonly #descriptor: number;
	#gathered: Buffer[] = [];
	#waiting = 0;
	#closed = false;

	private constructor(
		/** Path of the shard without ".tar". */
		readonly path: string,
		readonly number: number,
		descriptor: number,
		public bytes: number,
		public samples: number,
	) {
		this.#descriptor = descriptor;
	}

	static create(path: string, number: number): ShardFile {
		return new ShardFile(path, number, open(`${path}.tar.part`, "w+"), 0, 0);
	}

	/** Reopens a shard in the state of the journal: later bytes are removed, and a finished shard becomes unfinished. */
	static reopen(path: string, { number, bytes, samples }: OpenShard): ShardFile {
		if (!existsSync(`${path}.tar.part`) && existsSync(`${path}.tar`)) renameSync(`${path}.tar`, `${path}.tar.part`);
		const descriptor = open(`${path}.tar.part`, "r+");
		if (fstatSync(descriptor).size < bytes) {
			closeSync(descriptor);
			throw new UserError(
				`${path}.tar.part is shorter than when the import stopped: remove the folder and import again.`,
			);
		}
		ftruncateSync(descriptor, bytes);
		return new ShardFile(path, number, descriptor, bytes, samples);
	}

	get state(): OpenShard {
		return { number: this.number, bytes: this.bytes, samples: this.samples };
	}

	add(key: string, parts: readonly SamplePart[]): void {
		const size = parts.reduce((sum, [, content]) => sum + memberBytes(content.length), 0);
		const block = Buffer.alloc(size);
		let at = 0;
		for (const [extension, content] of parts) {
			putMember(block, at, `${key}.${extension}`, content);
			at += memberBytes(content.length);
		}
		this.#gathered.push(block);
		this.#waiting += size;
		this.bytes += size;
		this.samples++;
		if (this.#waiting >= GATHERED) this.flush();
	}

	flush(): void {
		const block = this.#gathered.length === 1 ? this.#gathered[0]! : Buffer.concat(this.#gathered);
		write(this.#descriptor, block, this.bytes - this.#waiting, this.path);
		this.#gathered = [];
		this.#waiting = 0;
	}

	/** Flushes the shard to the disk. */
	sync(): void {
		this.flush();
		fsyncSync(this.#descriptor);
	}

	/** Finishes the shard. `order`: seed with which the samples are shuffled into another file; null keeps their order. */
	finish(order: number | null): void {
		this.flush();
		if (order === null) {
			write(this.#descriptor, tarEnd, this.bytes, this.path);
			this.close();
			renameSync(`${this.path}.tar.part`, `${this.path}.tar`);
			return;
		}
		this.close();
		shuffled(this.path, order);
	}

	/** Removes the unshuffled file of a shuffled shard; called once the journal lists the shard as finished. */
	clean(): void {
		rmSync(`${this.path}.tar.part`, { force: true });
	}

	/** Closes the file; a second call has no effect. */
	close(): void {
		if (this.#closed) return;
		this.#closed = true;
		fsyncSync(this.#descriptor);
		closeSync(this.#descriptor);
	}
}

/** Writes `PATH.tar` with the samples of `PATH.tar.part` in a random order from `seed`. */
function shuffled(path: string, seed: number): void {
	const file = LocalFile.open(`${path}.tar.part`);
	const { samples } = indexShard(file);
	file.close();
	const order = samples.map((_, i) => i);
	new PythonRandom(seed).shuffle(order);
	const from = open(`${path}.tar.part`, "r");
	const to = open(`${path}.tar.tmp`, "w");
	try {
		let at = 0;
		for (const i of order) {
			const { offset, size } = samples[i]!;
			const bytes = Buffer.alloc(size);
			for (let filled = 0; filled < size; ) {
				const count = readSync(from, bytes, filled, size - filled, offset + filled);
				if (count === 0) throw new UserError(`${path}.tar.part ends early.`);
				filled += count;
			}
			write(to, bytes, at, path);
			at += size;
		}
		write(to, tarEnd, at, path);
		fsyncSync(to);
	} finally {
		closeSync(from);
		closeSync(to);
	}
	renameSync(`${path}.tar.tmp`, `${path}.tar`);
}

function open(path: string, flags: string): number {
	try {
		return openSync(path, flags);
	} catch (error) {
		throw fileError("open", path, error);
	}
}

function write(descriptor: number, bytes: Uint8Array, offset: number, path: string): void {
	try {
		for (let done = 0; done < bytes.length; ) {
			done += writeSync(descriptor, bytes, done, bytes.length - done, offset + done);
		}
	} catch (error) {
		throw fileError("write", `${path}.tar.part`, error);
	}
}

const BLOCK = 512;

/** The end-of-archive blocks. */
const tarEnd = new Uint8Array(2 * BLOCK);

/** Bytes of a member with `size` bytes of content in an archive. */
function memberBytes(size: number): number {
	return BLOCK + Math.ceil(size / BLOCK) * BLOCK;
}

const template = Buffer.alloc(BLOCK);
template.write("0000644\0", 100, "latin1");
template.write("0000000\0", 108, "latin1");
template.write("0000000\0", 116, "latin1");
template.write("00000000000\0", 136, "latin1");
template.write("        ", 148, "latin1");
template.write("0", 156, "latin1");
template.write("ustar\0" + "00", 257, "latin1");
const templateSum = template.reduce((sum, byte) => sum + byte, 0);

/** Writes a member into zeroed `bytes` at `offset`; its name has at most 100 ASCII characters, its size below 8 GiB. */
function putMember(bytes: Buffer, offset: number, name: string, content: Uint8Array): void {
	if (name.length > 100 || content.length >= 2 ** 33) throw new RangeError(`${name} does not fit a tar header.`);
	template.copy(bytes, offset);
	bytes.write(name, offset, "latin1");
	const size = content.length.toString(8).padStart(11, "0");
	bytes.write(size, offset + 124, "latin1");
	let sum = templateSum;
	for (let i = 0; i < name.length; i++) sum += name.charCodeAt(i);
	for (let i = 0; i < size.length; i++) sum += size.charCodeAt(i);
	bytes.write(`${sum.toString(8).padStart(6, "0")}\0 `, offset + 148, "latin1");
	bytes.set(content, offset + BLOCK);
}
