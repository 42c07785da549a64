/**
 * Writes the shards of an import, for each part of the data set. With shuffling, each sample goes to a random one of several open
 * shards, and the samples of a full shard are shuffled.
 */

import { readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { CryptoHasher } from "bun";
import { type Part, parts } from "./row.ts";
import { type OpenShard, type SamplePart, ShardFile } from "./shard-file.ts";

export interface ShardOptions {
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
export interface PartState {
	/** Number of samples so far. */
	readonly samples: number;
	/** Number of the next new shard. */
	readonly next: number;
	readonly open: readonly (OpenShard | null)[];
}

export type ShardsState = Readonly<Record<Part, PartState>>;

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
