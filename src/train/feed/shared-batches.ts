/** Ranks of one lane take the same microbatches: the first reads them and broadcasts them to the others. */
import type { ImageSet } from "../../data/images.ts";
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { Device } from "../../native/device.ts";
import type { Group } from "../../parallel/index.ts";
import { Tensor } from "../../tensor/index.ts";
import type { BatchSource } from "./batch-source.ts";

export interface Lane {
	/** Whether this rank reads. */
	readonly reads: boolean;
	/** Returns the reader's microbatches on every rank of the lane. Collective over the lane. */
	share(own: readonly ImageTextMicrobatch[] | null): readonly ImageTextMicrobatch[];
}

/** A lane of one rank. */
export const ownLane: Lane = {
	reads: true,
	share: (own) => own!,
};

/** `group`: ranks of one lane; the first one reads. */
export function laneOf(group: Group, device: Device): Lane {
	if (group.size === 1) return ownLane;
	const reads = group.rank === 0;
	return {
		reads,
		share: (own) => {
			const bytes = reads ? packMicrobatches(own!) : null;
			const [length] = group.exchange(Int32Array.of(bytes?.length ?? 0))[0]!;
			using tensor = bytes === null ? Tensor.empty(device, [length!], "u8", "data") : Tensor.from(device, bytes);
			group.broadcast(tensor, 0).wait();
			if (reads) return own!;
			const received = new Uint8Array(length!);
			device.copyToHost(received, tensor);
			return unpackMicrobatches(received);
		},
	};
}

/** A microbatch without its large arrays. */
interface Outline {
	readonly tokens: number;
	readonly lengths: readonly number[];
	readonly samples?: readonly number[];
	readonly padding?: number;
	/** Positions that its tokens have on several axes; absent: none. */
	readonly placed?: number;
	/** By the encoder's name, in the order of their arrays. */
	readonly features: readonly (readonly [
		module: string,
		set: Omit<ImageSet, "patches"> & { readonly values: number },
	])[];
}

/** Serialises microbatches: a JSON outline of all, then the raw ids, labels, masks and patches of each. */
export function packMicrobatches(microbatches: readonly ImageTextMicrobatch[]): Uint8Array {
	const outlines = microbatches.map(({ text, features }): Outline => {
		const { ids, labels: _, lossMask: __, positions, ...rest } = text;
		const sets = Object.entries(features).map(
			([module, { patches, ...places }]) => [module, { ...places, values: patches.length }] as const,
		);
		return { ...rest, tokens: ids.length, ...(positions && { placed: positions.length }), features: sets };
	});
	const outline = new TextEncoder().encode(JSON.stringify(outlines));
	const arrays = microbatches.flatMap(({ text, features }) => [
		...[text.ids, text.labels, text.lossMask, ...(text.positions ? [text.positions] : [])],
		...Object.values(features).map(({ patches }) => patches),
	]);
	const begin = 4 * Math.ceil(outline.length / 4) + 4;
	const bytes = new Uint8Array(begin + arrays.reduce((sum, array) => sum + array.byteLength, 0));
	new DataView(bytes.buffer).setUint32(0, outline.length, true);
	bytes.set(outline, 4);
	let at = begin;
	for (const array of arrays) {
		bytes.set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength), at);
		at += array.byteLength;
	}
	return bytes;
}

/** Deserialises packMicrobatches' bytes; the arrays are views of `bytes`. */
export function unpackMicrobatches(bytes: Uint8Array): ImageTextMicrobatch[] {
	const { buffer, byteOffset } = bytes;
	const length = new DataView(buffer, byteOffset).getUint32(0, true);
	const outlines = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))) as Outline[];
	let at = byteOffset + 4 + 4 * Math.ceil(length / 4);
	const place = (count: number): [ArrayBufferLike, number, number] => {
		at += 4 * count;
		return [buffer, at - 4 * count, count];
	};
	return outlines.map(({ tokens, lengths, samples, padding, placed, features }) => ({
		text: {
			ids: new Int32Array(...place(tokens)),
			labels: new Int32Array(...place(tokens)),
			lossMask: new Float32Array(...place(tokens)),
			...(placed !== undefined && { positions: new Int32Array(...place(placed)) }),
			lengths,
			...(samples && { samples }),
			...(padding !== undefined && { padding }),
		},
		features: Object.fromEntries(
			features.map(([module, { values, ...set }]) => [module, { patches: new Float32Array(...place(values)), ...set }]),
		),
	}));
}

// Reads a rank's batches step by step, the next ones while the GPU still works on the current step.

type Microbatches = readonly ImageTextMicrobatch[];

export interface StepBatch {
	readonly microbatches: Microbatches;
	/** The next step's, where they are known. */
	readonly upcoming: Microbatches;
}

export class BatchQueue {
	readonly #read = new Map<number, Promise<Microbatches>>();

	/**
	 * `last`: the training's last step. `upcoming`: number of further steps whose batches a step wants. A source with a state is
	 * never read ahead, because a checkpoint must hold the state after the saved step.
	 */
	constructor(
		private readonly source: Pick<BatchSource, "step" | "save">,
		private readonly last: number,
		private readonly upcoming: 0 | 1,
	) {}

	/** The batches of a step, and of the next step if `upcoming` asks for them. */
	async step(iteration: number): Promise<StepBatch> {
		for (const earlier of this.#read.keys()) if (earlier < iteration) this.#read.delete(earlier);
		const microbatches = await this.#want(iteration);
		const next = iteration + 1;
		// A failed read of the next step fails this one: tensor-parallel ranks encode the next batches together, and a rank
		// without them would leave the others in a collective that it never joins.
		const upcoming = this.upcoming === 1 && this.#mayRead(next) ? await this.#want(next) : [];
		return { microbatches, upcoming };
	}

	/**
	 * Reads what the step after `iteration` wants. A failure is kept for that step, so that step `iteration` is still logged and
	 * saved.
	 */
	async readAhead(iteration: number): Promise<void> {
		const wanted = Array.from({ length: 1 + this.upcoming }, (_, index) => iteration + 1 + index);
		for (const step of wanted.filter((step) => this.#mayRead(step))) await Promise.allSettled([this.#want(step)]);
	}

	#mayRead(iteration: number): boolean {
		return iteration <= this.last && this.source.save === undefined;
	}

	#want(iteration: number): Promise<Microbatches> {
		const read = this.#read.get(iteration) ?? (async () => await this.source.step(iteration))();
		this.#read.set(iteration, read);
		return read;
	}
}
