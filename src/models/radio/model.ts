/**
 * The RADIO vision transformer (docs/spec/vision.md §1, §2): patches of images, image after image → rows of features.
 * Its parameters belong to the module it is part of.
 */
import { type Group, gatherColumns } from "../../parallel/index.ts";
import {
	add,
	layerNorm,
	linear,
	type Parameter,
	ResidualSum,
	spmm,
	type Tape,
	type Tensor,
} from "../../tensor/index.ts";
import type { PipelineSegment } from "../language/pipeline-segments.ts";
import type { EncoderObserver } from "../tower.ts";
import { outputWidth, type RadioConfig } from "./config.ts";
import { radioLayer } from "./layer.ts";
import { radioLayerPrefix, radioPrefix } from "./names.ts";
import type { PackedEmbedding, PackedImages } from "./packing.ts";

export class RadioModel {
	constructor(
		readonly config: RadioConfig,
		/** Ranks that cut the tower. */
		readonly tp: Group,
		private readonly parameters: { get(name: string): Parameter },
		private readonly segment: PipelineSegment,
	) {}

	/**
	 * patches_N(3p²) → features, [packed.rows, outputWidth]. A segment behind the first takes the stream, [tokens, hiddenSize], and one
	 * before the last gives it. At least one image. Observed are "embedder", "decoder_input", "layer.0" …, "radio_out" and "encoder_out".
	 */
	forward(tape: Tape, entered: Tensor, packed: PackedImages, observe?: EncoderObserver): Tensor {
		const { embedding } = packed;
		using first = embedding === null ? entered.share() : this.#embed(tape, entered, embedding, observe);
		using last = this.#layers(tape, first, packed, observe);
		if (!this.segment.hasHead) return last.written().share();
		using normed = this.#finalNorm(tape, last);
		observe?.("radio_out", normed);
		const shape = [packed.rows, outputWidth(this.config)];
		const features = packed.output ? spmm(tape, packed.output, normed, { shape }) : normed.share();
		observe?.("encoder_out", features);
		return features;
	}

	#embed(tape: Tape, patches: Tensor, packed: PackedEmbedding, observe: EncoderObserver | undefined): Tensor {
		tape.begin("encoder.embedding");
		using part = linear(tape, patches, this.#parameter("embedder.weight"));
		using embedded = gatherColumns(tape, part, this.tp);
		observe?.("embedder", embedded);
		using positions = spmm(tape, packed.positions, this.#parameter("position_embeddings"));
		using placed = add(tape, embedded, positions);
		using stream = this.#addClassTokens(tape, placed, packed);
		observe?.("decoder_input", stream);
		return stream.share();
	}

	#addClassTokens(tape: Tape, patches: Tensor, packed: PackedEmbedding): Tensor {
		if (this.config.classTokens === 0) return patches.share();
		using base = spmm(tape, packed.patches, patches);
		return spmm(tape, packed.classTokens, this.#parameter("class_token"), { base });
	}

	#layers(tape: Tape, first: Tensor, packed: PackedImages, observe: EncoderObserver | undefined): ResidualSum {
		let x = ResidualSum.of(first);
		for (let index = this.segment.begin; index < this.segment.end; index++) {
			using previous = x;
			tape.begin(`encoder.layer.${index}`);
			const weights = (name: string) => this.parameters.get(radioLayerPrefix(index) + name);
			x = radioLayer(tape, { config: this.config, tp: this.tp, weights, sequences: packed.sequences }, previous);
			observe?.(`layer.${index}`, x.written());
		}
		tape.begin("encoder.output");
		return x;
	}

	#finalNorm(tape: Tape, x: ResidualSum): Tensor {
		if (!this.config.finalLayerNorm) return x.written().share();
		const [weight, bias] = [
			this.#parameter("decoder.final_layernorm.weight"),
			this.#parameter("decoder.final_layernorm.bias"),
		];
		return layerNorm(tape, x.tensor, weight, bias, this.config.normEpsilon, { sum: x });
	}

	#parameter(name: string): Parameter {
		return this.parameters.get(radioPrefix + name);
	}
}
