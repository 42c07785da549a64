/**
 * The vision transformer (docs/spec/vision.md §1, §2): patches of images, image after image → rows of features.
 * Its parameters belong to the module it is part of.
 */
import { type Group, gatherColumns, scatterColumns } from "../../parallel/index.ts";
import {
	activation,
	add,
	addLater,
	addScaledColumns,
	attention,
	joinColumns,
	layerNorm,
	linear,
	type Parameter,
	ResidualSum,
	reshape,
	rmsNorm,
	rope,
	type Sequences,
	splitColumns,
	spmm,
	type Tape,
	Tensor,
} from "../../tensor/index.ts";
import { type AdaptedProjection, adaptedColumns, adaptedRows, projectionOf } from "../adapted-linear.ts";
import type { PipelineSegment } from "../language/pipeline-segments.ts";
import type { EncoderObserver } from "../tower.ts";
import { featureWidth, type VitConfig } from "./config.ts";
import { qkNorms, vitLayerPrefix, vitPrefix } from "./names.ts";
import type { PackedEmbedding, PackedImages, PatchPlaces } from "./packing.ts";

export class VitModel {
	/** Rows of the layers that are tapped, until the last ones join them. */
	readonly #taps: Tensor[] = [];

	constructor(
		readonly config: VitConfig,
		/** Ranks that cut the tower. */
		readonly tp: Group,
		private readonly parameters: { get(name: string): Parameter },
		private readonly segment: PipelineSegment,
	) {}

	/**
	 * patches_N(3p²) → features, [packed.rows, outputWidth]. A segment behind the first takes the stream, [tokens, hiddenSize], with the
	 * values of the layers tapped so far beside it, as wide each, and one before the last gives them. At least one image. Observed are "embedder", "decoder_input", "layer.0" …, "radio_out" and "encoder_out".
	 */
	forward(tape: Tape, entered: Tensor, packed: PackedImages, observe?: EncoderObserver): Tensor {
		const { embedding } = packed;
		using first =
			embedding === null ? this.#enter(tape, entered, packed) : this.#embed(tape, entered, embedding, observe);
		using last = this.#layers(tape, first, packed, observe);
		if (!this.segment.hasHead) return this.#leave(tape, last.written());
		using normed = this.config.finalLayerNorm
			? this.#norm(tape, "decoder.final_layernorm.", last)
			: last.written().share();
		observe?.("radio_out", normed);
		using features = this.#rows(tape, normed, packed);
		observe?.("encoder_out", features);
		if (this.#taps.length === 0) return features.share();
		using taps = new DisposableStack();
		const all = this.#taps.splice(0).map((tap) => taps.use(tap));
		return joinColumns(tape, this.config.joinsTaps ? [...all, features] : [features, ...all]);
	}

	/** The stream of what the stage before gives; the tapped rows beside it stand in its shape. */
	#enter(tape: Tape, entered: Tensor, { rows }: PackedImages): Tensor {
		const { hiddenSize } = this.config;
		if (entered.width === hiddenSize) return entered.share();
		using owned = new DisposableStack();
		const sizes = new Array<number>(entered.width / hiddenSize).fill(hiddenSize);
		const [stream, ...taps] = splitColumns(tape, entered, sizes).map((window) =>
			owned.use(joinColumns(tape, [owned.use(window)])),
		);
		this.#taps.push(...taps.map((tap) => reshape(tape, tap, [rows, featureWidth(this.config)])));
		return stream!.share();
	}

	/** Input of the next stage. */
	#leave(tape: Tape, stream: Tensor): Tensor {
		if (this.#taps.length === 0) return stream.share();
		using owned = new DisposableStack();
		const taps = this.#taps.splice(0).map((tap) => owned.use(reshape(tape, owned.use(tap), stream.shape)));
		return joinColumns(tape, [stream, ...taps]);
	}

	/** The rows that the language model sees of a layer's output. */
	#rows(tape: Tape, x: Tensor, packed: PackedImages): Tensor {
		const shape = [packed.rows, featureWidth(this.config)];
		return packed.output ? spmm(tape, packed.output, x, { shape }) : x.share();
	}

	#embed(tape: Tape, patches: Tensor, packed: PackedEmbedding, observe: EncoderObserver | undefined): Tensor {
		tape.begin("encoder.embedding");
		const bias = this.config.patchBias ? this.#parameter("embedder.bias") : null;
		using part = linear(tape, patches, this.#parameter("embedder.weight"), bias);
		using embedded = gatherColumns(tape, part, this.tp);
		observe?.("embedder", embedded);
		using sum = ResidualSum.of(embedded);
		using normed = this.config.patchNorm ? this.#norm(tape, "embedder_norm.", sum) : embedded.share();
		using placed = this.#addPositions(tape, normed, packed);
		using stream = this.#addClassTokens(tape, placed, packed);
		observe?.("decoder_input", stream);
		return stream.share();
	}

	#addPositions(tape: Tape, embedded: Tensor, packed: PackedEmbedding): Tensor {
		if (packed.positions === null) return embedded.share();
		using positions = spmm(tape, packed.positions, this.#parameter("position_embeddings"));
		return add(tape, embedded, positions);
	}

	/** The stream: patches in its order, behind their image's class tokens. */
	#addClassTokens(tape: Tape, patches: Tensor, packed: PackedEmbedding): Tensor {
		const { classTokens, windows } = this.config;
		if (classTokens === 0 && windows === null) return patches.share();
		using base = spmm(tape, packed.patches, patches);
		if (classTokens === 0) return base.share();
		using tokens = spmm(tape, packed.classTokens, this.#parameter("class_token"), { base });
		if (!this.config.classPositions) return tokens.share();
		return spmm(tape, packed.classTokens, this.#parameter("class_position_embeddings"), { base: tokens });
	}

	#layers(tape: Tape, first: Tensor, packed: PackedImages, observe: EncoderObserver | undefined): ResidualSum {
		let x = ResidualSum.of(first);
		for (let index = this.segment.begin; index < this.segment.end; index++) {
			using previous = x;
			tape.begin(`encoder.layer.${index}`);
			const weights = (name: string) => this.parameters.get(vitLayerPrefix(index) + name);
			const { rotary } = packed;
			const whole = this.config.windows === null || this.config.windows.full.includes(index);
			const sequences = whole ? packed.sequences : packed.windows!;
			x = vitLayer(tape, { config: this.config, tp: this.tp, weights, sequences, rotary }, previous);
			observe?.(`layer.${index}`, x.written());
			if (this.config.taps.includes(index)) this.#taps.push(this.#rows(tape, x.written(), packed));
		}
		tape.begin("encoder.output");
		return x;
	}

	#norm(tape: Tape, name: string, x: ResidualSum): Tensor {
		return norm(tape, this.config, (end) => this.#parameter(end), name, x);
	}

	#parameter(name: string): Parameter {
		return this.parameters.get(vitPrefix + name);
	}
}

// One pre-norm layer of the tower (docs/spec/vision.md §1.5). Every tensor-parallel rank holds all tokens between
// layers; inside it has its own heads and its own part of the feed-forward width.

interface VitLayerContext {
	readonly config: VitConfig;
	readonly tp: Group;
	/** A parameter of this layer by the end of its name, such as "mlp.linear_fc1.bias". */
	readonly weights: (name: string) => Parameter;
	/** Images with their class tokens, or windows. */
	readonly sequences: Sequences;
	readonly rotary: PatchPlaces | null;
}

/** x_TC → x + attention(norm(x)), then that + mlp(norm(that)): a sum that the next norm may write. */
function vitLayer(tape: Tape, context: VitLayerContext, x: ResidualSum): ResidualSum {
	using attended = selfAttention(tape, context, x);
	using middle = addBranch(tape, context, x, attended, "self_attention.layer_scale");
	using fed = feedForward(tape, context, middle);
	return addBranch(tape, context, middle, fed, "mlp.layer_scale");
}

/** x + scale ⊙ branch; without layer scale x + branch. */
function addBranch(tape: Tape, context: VitLayerContext, x: ResidualSum, branch: Tensor, scale: string): ResidualSum {
	if (context.config.layerScale === null) return addLater(tape, x.written(), branch);
	using sum = addScaledColumns(tape, x.written(), branch, context.weights(scale));
	return ResidualSum.of(sum);
}

/**
 * The norm and first projection of a branch: norm(x) Wᵀ + b of the linear layer named `name`, own part of its outputs. `gelu`
 * gets their GELU.
 */
function normedLinear(
	tape: Tape,
	context: VitLayerContext,
	x: ResidualSum,
	name: string,
	gelu: Tensor | null = null,
): Tensor {
	const { config, tp, weights } = context;
	using normed = norm(tape, config, weights, `${name}.layer_norm_`, x);
	return adaptedColumns(tape, normed, projection(context, name), tp, { gelu });
}

/** The norm whose parameters have these names up to "weight" and "bias". */
function norm(
	tape: Tape,
	{ normalization, normEpsilon }: VitConfig,
	weights: (name: string) => Parameter,
	name: string,
	x: ResidualSum,
): Tensor {
	const weight = weights(`${name}weight`);
	if (normalization === "RMSNorm") return rmsNorm(tape, x.tensor, weight, normEpsilon, { sum: x });
	return layerNorm(tape, x.tensor, weight, weights(`${name}bias`), normEpsilon, { sum: x });
}

function projection({ config, weights }: VitLayerContext, name: string): AdaptedProjection {
	const bias = name === "self_attention.linear_qkv" ? config.qkvBias : config.linearBias;
	return projectionOf(weights, name, { lora: config.lora, bias });
}

function selfAttention(tape: Tape, context: VitLayerContext, x: ResidualSum): Tensor {
	const { config, tp, sequences } = context;
	using projected = normedLinear(tape, context, x, "self_attention.linear_qkv");
	const heads = { queryHeads: config.heads / tp.size, keyHeads: config.heads / tp.size, headDim: config.headDim };
	using normed = config.qkNorm ? normedHeads(tape, context, projected, heads.queryHeads) : projected.share();
	using qkv = turned(tape, context, normed, heads);
	using attended = attention(tape, qkv, {
		...heads,
		sequences,
		mask: "full",
		softmaxScale: config.softmaxScale,
	});
	return adaptedRows(tape, attended, projection(context, "self_attention.linear_proj"), tp);
}

/** Of qkv_T(3hd), per head query, key and value: queries and keys under norms over those of all heads of all ranks. */
function normedHeads(tape: Tape, { config, tp, weights }: VitLayerContext, qkv: Tensor, heads: number): Tensor {
	const { headDim: d } = config;
	using owned = new DisposableStack();
	const own = (x: Tensor) => owned.use(x);
	const byHead = own(reshape(tape, qkv, [qkv.rows * heads, 3 * d]));
	const [query, key, value] = splitColumns(tape, byHead, [d, d, d]).map(own);
	const normed = [query!, key!].map((part, at) => {
		const rows = own(reshape(tape, own(joinColumns(tape, [part])), [qkv.rows, heads * d]));
		const whole = own(rmsNorm(tape, own(gatherColumns(tape, rows, tp)), weights(qkNorms[at]!), 1e-6));
		return own(reshape(tape, own(scatterColumns(tape, whole, tp)), [byHead.rows, d]));
	});
	return reshape(tape, own(joinColumns(tape, [...normed, value!])), qkv.shape);
}

/** Query and key heads turned by their patches' rows and columns. */
function turned(
	tape: Tape,
	{ rotary }: VitLayerContext,
	qkv: Tensor,
	heads: { readonly queryHeads: number; readonly keyHeads: number; readonly headDim: number },
): Tensor {
	return (rotary?.axes ?? []).reduce((before, { positions, frequencies }) => {
		using _before = before;
		const place = { sequences: rotary!.tokens, firstPositions: positions, frequencies, base: 1, percent: 1 };
		return rope(tape, before, { ...heads, ...place });
	}, qkv.share());
}

function feedForward(tape: Tape, context: VitLayerContext, x: ResidualSum): Tensor {
	const { config, tp } = context;
	const inner = projection(context, "mlp.linear_fc1");
	const outer = projection(context, "mlp.linear_fc2");
	if (config.activation === "geluTanh" && inner.adapter === null && outer.adapter === null) {
		// Both products have the GELU in them.
		using activated = Tensor.empty(tape.device, [x.tensor.rows, outer.weight.value.width], x.tensor.dtype);
		using hidden = normedLinear(tape, context, x, "mlp.linear_fc1", activated);
		return adaptedRows(tape, activated, outer, tp, { geluOf: hidden });
	}
	using hidden = normedLinear(tape, context, x, "mlp.linear_fc1");
	using activated = activation(tape, hidden, config.activation);
	return adaptedRows(tape, activated, outer, tp);
}
