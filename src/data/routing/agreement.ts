/**
 * The agreements of the ranks of a step. Samples with a damaged image, which only the ranks that encode it notice: all ranks
 * exchange them before they train, and the language ranks mask their tokens out of the loss, so that what a rank reads never
 * depends on what another rank decodes. And a running hash of a lane's samples: encoder and language ranks read the same
 * lanes independently, and compare the hashes each step.
 */

import { UserError } from "../../system/errors.ts";
import type { Microbatch } from "../microbatch.ts";
import { ignored } from "../vision-language/encoding.ts";

/** A sample by its place in the step. */
export interface Damage {
	readonly lane: number;
	/** Of the lane's microbatches since the last exchange. */
	readonly microbatch: number;
	readonly sample: number;
}

/** Integers of a damaged sample in an exchange. */
const damageWidth = 3;

/**
 * The damaged samples of all ranks, each once. Every rank calls this with `most`, the largest number that a rank has, which
 * all know.
 */
export function exchangeDamage(
	own: readonly Damage[],
	most: number,
	exchange: (values: Int32Array) => Int32Array[],
): Damage[] {
	if (most === 0) return [];
	const values = new Int32Array(most * damageWidth).fill(-1);
	for (const [i, { lane, microbatch, sample }] of own.entries())
		values.set([lane, microbatch, sample], i * damageWidth);
	const all = new Map<string, Damage>();
	for (const one of exchange(values)) {
		for (let at = 0; at < one.length; at += damageWidth) {
			const [lane, microbatch, sample] = one.subarray(at, at + damageWidth) as unknown as [number, number, number];
			if (lane >= 0) all.set(`${lane} ${microbatch} ${sample}`, { lane, microbatch, sample });
		}
	}
	return [...all.values()];
}

/** Leaves the tokens [begin, end) out of the loss. */
export function leaveOut({ labels, lossMask }: Microbatch, [begin, end]: readonly [number, number]): void {
	labels.fill(ignored, begin, end);
	lossMask.fill(0, begin, end);
}

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
interface LaneReport {
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
