/**
 * Features of a frozen tower made ahead of time (docs/spec/runtime.md §9): where an encoder rank would wait for
 * gradients, it runs the tower on microbatches that are still to come, of this step and of the next. The projector,
 * which trains, stays in its place in the schedule. Values are the same bit for bit: a frozen tower does not change.
 */
import type { ImageSet } from "../data/images.ts";
import type { EncodedFeatures, EncoderModule } from "../models/vision/encoder.ts";
import { patchTensor } from "./encoder-pass.ts";

export interface PrefetchOptions {
	/** Microbatches whose features are kept ready at most. */
	readonly depth: number;
	/** Called with lines that say how long encoding took and how much was ready; null: no lines. */
	readonly debug: ((line: string) => void) | null;
}

export class FeaturePrefetch implements Disposable {
	/** Announced and not encoded yet, in order. */
	readonly #coming: ImageSet[] = [];
	readonly #ready = new Map<ImageSet, EncodedFeatures>();
	#taken = 0;
	#encoded = 0;

	constructor(
		private readonly encoder: EncoderModule,
		private readonly options: PrefetchOptions,
	) {}

	/** Microbatches that will be taken next, in order; those that were announced before are known. */
	announce(microbatches: readonly ImageSet[]): void {
		for (const images of microbatches) {
			if (images.grids.length === 0 || this.#ready.has(images) || this.#coming.includes(images)) continue;
			this.#coming.push(images);
		}
	}

	/** Features of a microbatch with images; the receiver disposes them. */
	take(images: ImageSet): EncodedFeatures {
		const { depth, debug } = this.options;
		debug?.(`consumer batch=${this.#taken++} ready_at_request=${this.#ready.size}/${depth}`);
		const ready = this.#ready.get(images);
		if (ready) {
			this.#ready.delete(images);
			return ready;
		}
		const at = this.#coming.indexOf(images);
		if (at >= 0) this.#coming.splice(at, 1);
		return this.#encode(images);
	}

	/** Encodes until `depth` microbatches are ready. */
	fill(): void {
		while (this.#ready.size < this.options.depth) {
			const images = this.#coming.shift();
			if (!images) return;
			this.#ready.set(images, this.#encode(images));
		}
	}

	#encode(images: ImageSet): EncodedFeatures {
		const started = performance.now();
		using patches = patchTensor(this.encoder, images);
		const features = this.encoder.frozenFeatures(patches, images.grids);
		const milliseconds = (performance.now() - started).toFixed(1);
		this.options.debug?.(`producer batch=${this.#encoded++} encode_ms=${milliseconds}`);
		return features;
	}

	[Symbol.dispose](): void {
		for (const { features } of this.#ready.values()) features[Symbol.dispose]();
		this.#ready.clear();
	}
}
