/**
 * Runs a frozen tower ahead of time (--mimo-encoder-prefetch, docs/spec/runtime.md §9): while an encoder rank would wait for
 * gradients it encodes later microbatches of this step and the next. The projector trains, so it stays in its place in the
 * schedule. Results are equal bit for bit, since a frozen tower does not change.
 */
import type { ImageSet } from "../data/images.ts";
import type { EncodedFeatures, EncoderModule } from "../models/vision/encoder.ts";
import { patchTensor } from "./encoder-pass.ts";

export interface PrefetchOptions {
	/** Largest number of microbatches whose features are kept. */
	readonly depth: number;
	/** Called with lines about encoding times and the number of features ready; null: not called. */
	readonly debug: ((line: string) => void) | null;
}

export class FeaturePrefetch implements Disposable {
	/** Announced microbatches that are not encoded yet, in order. */
	readonly #coming: ImageSet[] = [];
	readonly #ready = new Map<ImageSet, EncodedFeatures>();
	#taken = 0;
	#encoded = 0;

	constructor(
		private readonly encoder: EncoderModule,
		private readonly options: PrefetchOptions,
	) {}

	/** Announces the microbatches to be taken next, in order; those announced before are skipped. */
	announce(microbatches: readonly ImageSet[]): void {
		for (const images of microbatches) {
			if (images.grids.length === 0 || this.#ready.has(images) || this.#coming.includes(images)) continue;
			this.#coming.push(images);
		}
	}

	/** Features of a microbatch with images, encoded now if they are not ready; the caller disposes them. */
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

	/** Encodes announced microbatches until `depth` are ready. */
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
