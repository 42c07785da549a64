/**
 * Writes the shards of an import, for each part of the data set. With shuffling, each sample goes to a random one of several open
 * shards, and the samples of a full shard are shuffled.
 */
import {
	closeSync,
	existsSync,
	fstatSync,
	fsyncSync,
	ftruncateSync,
	openSync,
	readdirSync,
	readSync,
	renameSync,
	rmSync,
	writeSync,
} from "node:fs";
import { join } from "node:path";
import { CryptoHasher } from "bun";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
import { indexShard } from "../energon/prepare/shard-index.ts";
import { PythonRandom } from "../energon/random/python-random.ts";
import { LocalFile } from "../energon/storage/open.ts";
import { type Part, parts } from "./row.ts";

// Writes a shard: samples are appended to `NAME.tar.part`, which becomes `NAME.tar` when the shard is finished.

export type SamplePart = readonly [extension: string, content: Uint8Array];

/** State of a shard when the journal was written. */
interface OpenShard {
	readonly number: number;
	readonly bytes: number;
	readonly samples: number;
}

/** Bytes that are collected before a write. */
const GATHERED = 2 ** 20;

class ShardFile {
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

interface ShardOptions {
	/** Number of samples, and of bytes, of a full shard. */
	readonly samples: number;
	readonly bytes: number;
	/** Shares of train, val and test by which rows are divided; null: the parts of the source. */
	readonly shares: readonly [number, number, number] | null;
	/** Seed of the shuffling; null keeps the order of the source. */
	readonly shuffle: number | null;
}

/** Number of open shards of a part with shuffling. */
const OPEN_AT_ONCE = 8;

/** State of a part in the journal. */
interface PartState {
	/** Number of samples so far. */
	readonly samples: number;
	/** Number of the next new shard. */
	readonly next: number;
	readonly open: readonly (OpenShard | null)[];
}

type ShardsState = Readonly<Record<Part, PartState>>;

interface OpenPart {
	samples: number;
	next: number;
	readonly open: (ShardFile | null)[];
}

export class Shards {
	readonly #parts: Record<Part, OpenPart>;
	#finished: ShardFile[] = [];

	/** Continues from the state in a journal; null: from the beginning. */
	constructor(
		private readonly folder: string,
		private readonly options: ShardOptions,
		state: ShardsState | null,
	) {
		const places = options.shuffle === null ? 1 : OPEN_AT_ONCE;
		const opened = (part: Part): OpenPart => {
			const kept = state?.[part];
			if (kept === undefined) return { samples: 0, next: 0, open: new Array(places).fill(null) };
			removeUnknown(folder, part, kept);
			const open = kept.open.map((shard) => shard && ShardFile.reopen(this.#path(part, shard.number), shard));
			return { samples: kept.samples, next: kept.next, open };
		};
		this.#parts = { train: opened("train"), val: opened("val"), test: opened("test") };
	}

	get state(): ShardsState {
		const stateOf = ({ samples, next, open }: OpenPart) => ({
			samples,
			next,
			open: open.map((one) => one?.state ?? null),
		});
		const { train, val, test } = this.#parts;
		return { train: stateOf(train), val: stateOf(val), test: stateOf(test) };
	}

	#path(part: Part, number: number): string {
		return join(this.folder, `${part}-${String(number).padStart(6, "0")}`);
	}

	/** The part of the next sample: with shares the part that lacks most of its share. */
	partOf(own: Part | null): Part {
		const { shares } = this.options;
		if (shares === null) return own ?? "train";
		const total = shares.reduce((sum, share) => sum + share, 0);
		const all = parts.reduce((sum, part) => sum + this.#parts[part].samples, 0);
		const lacking = parts.map((part, i) => (shares[i]! / total) * (all + 1) - this.#parts[part].samples);
		return parts[lacking.indexOf(Math.max(...lacking))]!;
	}

	/** Adds a sample. Returns true if a shard became full: then the caller writes the journal and calls `clean`. */
	add(part: Part, key: string, content: readonly SamplePart[]): boolean {
		const own = this.#parts[part];
		const place = this.options.shuffle === null ? 0 : draw(`${this.options.shuffle},${key}`, own.open.length);
		let shard = own.open[place] ?? null;
		if (shard === null) {
			shard = ShardFile.create(this.#path(part, own.next), own.next);
			own.next++;
			own.open[place] = shard;
		}
		shard.add(key, content);
		own.samples++;
		if (shard.samples < this.options.samples && shard.bytes < this.options.bytes) return false;
		this.#finish(own, place);
		return true;
	}

	#finish(part: OpenPart, place: number): void {
		const shard = part.open[place]!;
		const { shuffle } = this.options;
		shard.finish(shuffle === null ? null : draw(`${shuffle},shard ${shard.path.split("/").at(-1)}`, 2 ** 32));
		part.open[place] = null;
		this.#finished.push(shard);
	}

	/** Flushes all samples to the disk. */
	sync(): void {
		for (const part of parts) for (const shard of this.#parts[part].open) shard?.sync();
	}

	/** Removes the partial files of finished shards; called once the journal lists these shards. */
	clean(): void {
		for (const shard of this.#finished) shard.clean();
		this.#finished = [];
	}

	/** Finishes the shards that are not full. */
	end(): void {
		for (const part of parts) {
			const own = this.#parts[part];
			for (const [place, shard] of own.open.entries()) if (shard !== null) this.#finish(own, place);
		}
	}

	/** Closes the open shards, which can be reopened from the journal. */
	close(): void {
		for (const part of parts) for (const shard of this.#parts[part].open) shard?.close();
	}
}

/** Removes shards that are newer than the journal, and unshuffled files of finished shards. */
function removeUnknown(folder: string, part: Part, { next, open }: PartState): void {
	const kept = new Set(open.map((shard) => shard?.number));
	for (const name of readdirSync(folder)) {
		const [, digits, unfinished] = new RegExp(`^${part}-(\\d{6,})\\.tar(\\.part|\\.tmp)?$`).exec(name) ?? [];
		if (digits === undefined) continue;
		const number = Number(digits);
		if (number >= next || (unfinished !== undefined && !kept.has(number))) rmSync(join(folder, name));
	}
}

/** A pseudo-random number below `below`, from a text. */
function draw(text: string, below: number): number {
	return new CryptoHasher("sha256").update(text).digest().readUInt32BE(0) % below;
}
