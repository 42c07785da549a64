/**
 * Runs a frozen tower ahead of time (--mimo-encoder-prefetch, docs/spec/runtime.md §9): while an encoder rank would wait for
 * gradients it encodes later microbatches of this step and the next. The projector trains, so it stays in its place in the
 * schedule. Results are equal bit for bit, since a frozen tower does not change.
 */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { type ImageSet, patchTensor } from "../../data/images.ts";
import { featuresOf, type ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { EncoderModule } from "../../models/vision/encoder.ts";
import { visionModule } from "../../parallel/index.ts";
import type { Action } from "../../schedule/actions.ts";
import type { Tensor } from "../../tensor/index.ts";
import type { EncodeImages, Guest, GuestStep, RankGuest, StepGuest } from "../guest.ts";

/** --mimo-encoder-prefetch. `rank`: in lines of --mimo-encoder-prefetch-debug. */
export function prefetchOf(c: TrainingConfiguration, rank: number): Guest | null {
	if (!c.mimoEncoderPrefetch) return null;
	const debug = c.mimoEncoderPrefetchDebug
		? (line: string) => void process.stdout.write(`encoder prefetch rank=${rank} ${line}\n`)
		: null;
	const options = { depth: c.mimoEncoderPrefetchDepth, debug };
	return {
		readsAhead: true,
		open: ({ encoders }) => {
			const encoder = encoders.find(({ name }) => name === visionModule);
			return encoder ? new FeaturePrefetch(encoder.module, options) : null;
		},
	};
}

interface PrefetchOptions {
	/** Largest number of microbatches whose features are kept. */
	readonly depth: number;
	/** Called with lines about encoding times and the number of features ready; null: not called. */
	readonly debug: ((line: string) => void) | null;
}

class FeaturePrefetch implements RankGuest {
	/** Microbatches that are not encoded yet, in order. */
	readonly #coming: ImageSet[] = [];
	readonly #ready = new Map<ImageSet, Tensor>();
	#taken = 0;
	#encoded = 0;

	constructor(
		private readonly encoder: EncoderModule,
		private readonly options: PrefetchOptions,
	) {}

	/** Notes the microbatches to be taken next, in order; those of a step before are known already. */
	beforeStep({ microbatches, upcoming, training }: GuestStep): StepGuest | null {
		if (!training) return null;
		const imagesOf = (batch: ImageTextMicrobatch) => featuresOf(batch, visionModule);
		for (const images of [...microbatches, ...upcoming].map(imagesOf)) {
			if (images.grids.length === 0 || this.#ready.has(images) || this.#coming.includes(images)) continue;
			this.#coming.push(images);
		}
		return {
			encode: (encoder, index) => (encoder === this.encoder ? this.#projecting(imagesOf(microbatches[index]!)) : null),
		};
	}

	/** Encodes later images while this rank, which has the encoder alone, would wait for a gradient. */
	beforeAction(action: Action): void {
		if (action.kind === "receive" && action.direction === "backward") this.#fill();
	}

	/** Projects the features of `images`, which are encoded now if they are not ready; null without images. */
	#projecting(images: ImageSet): EncodeImages | null {
		if (images.grids.length === 0) return null;
		return (tape, _, { observe }) => {
			using features = this.#take(images);
			return this.encoder.project(tape, features, observe);
		};
	}

	/** The caller disposes the features. */
	#take(images: ImageSet): Tensor {
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

	/** Encodes coming microbatches until `depth` are ready. */
	#fill(): void {
		while (this.#ready.size < this.options.depth) {
			const images = this.#coming.shift();
			if (!images) return;
			this.#ready.set(images, this.#encode(images));
		}
	}

	#encode(images: ImageSet): Tensor {
		const started = performance.now();
		const { device, config } = this.encoder;
		using patches = patchTensor(device, config.tower, images);
		const features = this.encoder.frozenFeatures(patches, images.grids);
		const milliseconds = (performance.now() - started).toFixed(1);
		this.options.debug?.(`producer batch=${this.#encoded++} encode_ms=${milliseconds}`);
		return features;
	}

	[Symbol.dispose](): void {
		for (const features of this.#ready.values()) features[Symbol.dispose]();
		this.#ready.clear();
	}
}
