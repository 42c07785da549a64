/**
 * A running hash of a lane's samples. Encoder and language ranks read the same lanes independently, and compare the hashes each
 * step.
 */
import { UserError } from "../../system/errors.ts";

export class Trail {
	#hash = 0n;

	/** Continues from a saved hash. */
	constructor(hash = "0") {
		this.#hash = BigInt(`0x${hash}`);
	}

	add(names: readonly string[]): void {
		for (const name of names) this.#hash = Bun.hash.wyhash(name, this.#hash);
	}

	/** Hexadecimal. */
	get hash(): string {
		return this.#hash.toString(16);
	}

	/** Low and high half. */
	get words(): [number, number] {
		return [Number(BigInt.asIntN(32, this.#hash)), Number(BigInt.asIntN(32, this.#hash >> 32n))];
	}
}

/** A rank's report of a lane in a step. */
export interface LaneReport {
	readonly lane: number;
	readonly trail: Trail;
	/** Images of the lane's microbatches of this step. */
	readonly images: number;
	/** Samples of theirs that this rank could not decode. */
	readonly damaged: readonly unknown[];
}

/** Integers of a lane in a report: whether it is read, the hash's halves, images; and what is the rank's own, damaged samples. */
const [width, shared] = [5, 4];

/** The report of a rank that reads no lane. */
export function nothingRead(lanes: number): Int32Array {
	return new Int32Array(lanes * width);
}

/** A rank's reports as integers of one length on all ranks. */
export function encodeReports(reports: readonly LaneReport[], lanes: number): Int32Array {
	const values = nothingRead(lanes);
	for (const { lane, trail, images, damaged } of reports) {
		values.set([1, ...trail.words, images, damaged.length], lane * width);
	}
	return values;
}

/**
 * Compares the reports of all ranks; throws a UserError unless all that read a lane have the same samples. Returns the
 * images of every lane in this step.
 */
export function compareReports(ranks: readonly Int32Array[], iteration: number): number[] {
	const lanes = ranks[0]!.length / width;
	return Array.from({ length: lanes }, (_, lane) => {
		const of = (rank: number) => ranks[rank]!.subarray(lane * width, lane * width + shared);
		const readers = [...ranks.keys()].filter((rank) => of(rank)[0] === 1);
		const [first] = readers;
		if (first === undefined) return 0;
		const other = readers.find((rank) => of(rank).some((value, i) => value !== of(first)[i]));
		if (other !== undefined) {
			throw new UserError(
				`Step ${iteration}: ranks ${first} and ${other} have read different samples of data lane ${lane}; is the data set the same on all hosts, and unchanged?`,
			);
		}
		return of(first)[3]!;
	});
}

/** The most damaged samples that a rank reports. */
export function mostDamaged(ranks: readonly Int32Array[]): number {
	const ofRank = (values: Int32Array) =>
		values.reduce((sum, value, i) => (i % width === shared ? sum + value : sum), 0);
	return Math.max(...ranks.map(ofRank));
}
