/** One microbatch's pass through a model chunk of the language model: image rows or hidden states in, hidden states or a loss out. */

import { DeviceInput } from "../data/device-input.ts";
import { type Microbatch, sampleLengths } from "../data/microbatch.ts";
import type { Sampled } from "../elastic/router/router.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { ForwardInput, ModelChunk, Observer } from "../models/language/model-chunk.ts";
import type { Nodes } from "../models/language/nodes.ts";
import { checkImageRows, findImagePlaces, placeImageRows, placement } from "../models/vision/merge.ts";
import type { Rows } from "../parallel/index.ts";
import type { Gradients, Input, Pass } from "../schedule/pass.ts";
import {
	axpby,
	type FloatDtype,
	GradientSlot,
	type Parameter,
	type SparseMatrix,
	Tape,
	type TapeSegment,
	Tensor,
	type TokenSlice,
	type WeightGradients,
} from "../tensor/index.ts";
import { distillationLoss, type Teacher, teacherHidden } from "./distillation.ts";
import { tokenLoss } from "./language-loss.ts";
import { lossTokens, type MicrobatchWeights } from "./loss-weights.ts";
import { budgetLossName, distillationLossName, distillationLossOf, elasticLosses, type Losses } from "./losses.ts";
import { forEachMtpDepth } from "./mtp-loss.ts";

/** Options of a language model pass. */
export interface LanguagePassOptions {
	/** Ids of the tokens that encoders' rows replace, by the encoder's name. */
	readonly placeholders: ReadonlyMap<string, number>;
	/** The microbatch's sampled submodel of an elastic model; null: the model itself. */
	readonly elastic: Sampled | null;
	/** The teacher to distil from; null: the microbatch learns from labels alone. */
	readonly teacher: Teacher | null;
	/** Names the microbatch in messages, such as "microbatch 3". */
	readonly name: string;
	/** Philox key of the step's dropout masks. */
	readonly dropoutKey: number;
	/** Indices of the microbatch's tokens in the step's global batch. */
	readonly tokens: TokenSlice;
	/** Whether a backward pass follows; without one dropout is off and routers do not count tokens. */
	readonly training: boolean;
	/** Called when the pass has added its last contribution to a parameter's gradient. */
	readonly onGradient?: (parameter: Parameter) => void;
	/** Called with the model's activations, and with "per_token_loss". */
	readonly observe?: Observer | undefined;
}

export class LanguagePass implements Pass {
	readonly #tape: Tape;
	readonly #owned: Disposable[] = [];
	/** Gradients of the inputs' rows; null: not wanted. */
	readonly #slots: (GradientSlot | null)[] = [];
	#output: Rows | null = null;
	/** Losses of each token, and their gradients; empty on a chunk without the output layer. */
	readonly #losses: { readonly loss: Tensor; readonly gradient: Tensor }[] = [];
	readonly #nodes: Nodes<void>;
	/** Number of tape segments at the end of each node. */
	readonly #ends: number[] = [];

	/**
	 * `inputs` (taken over): encoders' rows for the first chunk, the chunk before's hidden states for others. The forward pass adds
	 * to `losses`. Throws a UserError that names the sample if an encoder's rows and their tokens differ in number.
	 */
	constructor(
		readonly model: HybridModel,
		readonly chunk: ModelChunk,
		microbatch: Microbatch,
		inputs: readonly Input[],
		losses: Losses,
		private readonly options: LanguagePassOptions,
	) {
		const { onGradient, training } = options;
		this.#tape = new Tape(model.device, { recording: training, ...(onGradient && { onGradient }) });
		for (const { rows } of inputs) this.#owned.push(rows.rows, ...(rows.beside ? [rows.beside] : []));
		this.#nodes = this.#forward(microbatch, inputs, losses);
	}

	get output(): Rows | null {
		return this.#output;
	}

	forward(node?: number): boolean {
		if (node !== undefined && node !== this.#ends.length)
			throw new RangeError(`Node ${node} is not next: ${this.#ends.length} is.`);
		let done: boolean;
		do {
			done = this.#nodes.next().done ?? false;
			this.#ends.push(this.#tape.segments.length);
		} while (!done && node === undefined);
		return done;
	}

	*#forward(microbatch: Microbatch, inputs: readonly Input[], losses: Losses): Nodes<void> {
		const { model, chunk, options } = this;
		const { device, parallel } = model;
		const leaves = inputs.map((input) => this.#leaf(input));
		const { ids, matrices } = chunk.segment.embeds ? this.#place(microbatch, inputs) : { ...microbatch, matrices: [] };
		const input = this.#own(new DeviceInput(device, { ...microbatch, ids }, parallel.tp));
		const features = this.#features(this.#tape, leaves, matrices);
		const { elastic } = options;
		const weights = losses.weights.of(microbatch);
		const plain = { ...input.forward(options.dropoutKey, options.tokens), routerWeight: weights.routers };
		const forward = { ...plain, ...features, masks: elastic?.masks };
		const taught = options.teacher && this.#own(this.#teach(options.teacher, plain, inputs, matrices));
		const before = chunk.segment.embeds ? null : leaves[0]!;
		using hidden = yield* chunk.hidden(this.#tape, forward, before, options.observe);
		if (!chunk.segment.hasHead) {
			this.#output = { rows: this.#own(hidden.share()), rowsPerSample: [], beside: taught };
			return;
		}
		const { observe } = options;
		forEachMtpDepth(this.#tape, chunk, microbatch, weights, hidden, forward, observe, (predicted, target) => {
			const { name, labels, meanMask, gradient } = this.#own(target);
			const watch = observe && ((value: string, logits: Tensor) => observe(`${target.place}.${value}`, logits));
			losses.add(this.#loss(predicted, labels, gradient, watch), meanMask, name);
		});
		const weight = this.#own(tokenWeights(input.mask, microbatch, weights));
		const loss = taught
			? this.#taughtLoss(options.teacher!, taught, hidden, { ...input, weight }, losses)
			: this.#loss(hidden, input.labels, weight, observe);
		observe?.("per_token_loss", loss);
		losses.add(loss, input.mask);
		if (elastic === null) return;
		losses.addShared(elastic.loss.value, lossTokens(microbatch), budgetLossName);
		const kind = elastic.draw.budget.parent ? elasticLosses.parent : elasticLosses.other;
		if (losses.names.includes(kind)) losses.add(loss, input.mask, kind);
	}

	/** Computes and records loss_T from normed hidden states. `gradient`: the weight of each token's loss. */
	#loss(normed: Tensor, labels: Tensor, gradient: Tensor, observe?: Observer): Tensor {
		using logits = this.chunk.logits(this.#tape, normed, observe);
		const loss = this.#own(tokenLoss(this.#tape, this.model, logits, labels));
		this.#losses.push({ loss, gradient });
		return loss;
	}

	/** Runs the teacher's chunk on the same rows of encoders, or on the hidden states that the teacher's chunk before has sent. */
	#teach(teacher: Teacher, plain: ForwardInput, inputs: readonly Input[], matrices: readonly SparseMatrix[]): Tensor {
		const rows = inputs.map(({ rows }) => rows.rows);
		const input = (tape: Tape): ForwardInput => ({ ...plain, ...this.#features(tape, rows, matrices) });
		return teacherHidden(teacher, this.model.chunks.indexOf(this.chunk), input, inputs[0]?.rows.beside ?? null);
	}

	/** Adds the encoders' rows to the embedding; nothing without encoders. */
	#features(
		tape: Tape,
		rows: readonly Tensor[],
		matrices: readonly SparseMatrix[],
	): Pick<ForwardInput, "addToEmbedding"> {
		if (matrices.length === 0) return {};
		const { tp } = this.model.parallel;
		const add = (embedded: Tensor, index: number): Tensor => {
			const placed = placeImageRows(tape, embedded, rows[index]!, matrices[index]!, tp);
			if (index + 1 === matrices.length) return placed;
			using _placed = placed;
			return add(placed, index + 1);
		};
		return { addToEmbedding: (embedded) => add(embedded, 0) };
	}

	/** Language model loss_T with weight 1 − α, and divergence from the teacher with weight α, both of `weight`_T. */
	#taughtLoss(
		teacher: Teacher,
		taught: Tensor,
		normed: Tensor,
		{ labels, mask, weight }: Pick<DeviceInput, "labels" | "mask"> & { readonly weight: Tensor },
		losses: Losses,
	): Tensor {
		const { alpha } = teacher;
		using logits = this.chunk.logits(this.#tape, normed, this.options.observe);
		const weighted = (share: number) => {
			const gradient = this.#own(Tensor.empty(this.model.device, weight.shape));
			axpby(weight, gradient, share, 0);
			return gradient;
		};
		// At α = 1 the language model loss is only logged, so its tape records nothing.
		const own = alpha < 1 ? this.#tape : new Tape(this.model.device, { recording: false });
		const loss = this.#own(tokenLoss(own, this.model, logits, labels));
		if (alpha < 1) this.#losses.push({ loss, gradient: weighted(1 - alpha) });
		const divergence = this.#own(distillationLoss(this.#tape, teacher, taught, logits));
		this.#losses.push({ loss: divergence, gradient: weighted(alpha) });
		losses.add(divergence, mask, distillationLossName);
		const { elastic } = this.options;
		if (elastic) losses.add(divergence, mask, distillationLossOf(elastic.draw.budget.value));
		return loss;
	}

	/** A leaf of this tape; the sender's backward pass continues from its gradient. */
	#leaf({ rows: { rows }, returns }: Input): Tensor {
		const wanted = this.options.training && returns;
		const slot = wanted ? new GradientSlot(this.model.device, rows.shape, rows.dtype as FloatDtype) : null;
		this.#slots.push(slot);
		return this.#own(rows.withGradient(slot));
	}

	#own<Owned extends Disposable>(owned: Owned): Owned {
		this.#owned.push(owned);
		return owned;
	}

	get returns(): boolean {
		return this.options.training;
	}

	backward(gradient: Tensor | null, weightGradients: WeightGradients, node?: number): Gradients | "more" {
		if (node === undefined || node === this.#ends.length - 1) this.#begin(gradient);
		if (node === undefined) this.#tape.backward(weightGradients);
		else for (const segment of this.#segments(node).reverse()) this.#tape.backwardSegment(segment, weightGradients);
		if (node !== undefined && node > 0) return "more";
		// Late weight gradients keep what they read alive themselves.
		this.#release();
		return this.#slots.map((slot) => slot?.take() ?? null);
	}

	/** Seeds the backward pass: sets the gradients of the outputs. */
	#begin(gradient: Tensor | null): void {
		for (const { loss, gradient: own } of this.#losses) loss.gradient?.accumulate(own.share());
		const slot = this.#output?.rows.gradient;
		if (slot && gradient) slot.accumulate(gradient);
		else gradient?.[Symbol.dispose]();
	}

	computeWeightGradients(node?: number): void {
		if (node === undefined) this.#tape.drain();
		else for (const segment of this.#segments(node).reverse()) this.#tape.drain(segment);
	}

	#segments(node: number): TapeSegment[] {
		return this.#tape.segments.slice(this.#ends[node - 1] ?? 0, this.#ends[node]);
	}

	[Symbol.dispose](): void {
		this.#nodes.return();
		this.#tape.discard();
		for (const slot of this.#slots) slot?.clear();
		this.#release();
	}

	#release(): void {
		for (const owned of this.#owned.splice(0)) owned[Symbol.dispose]();
	}

	/** The text's ids without the tokens that stand for rows, and the matrices that place the rows. */
	#place(text: Microbatch, inputs: readonly Input[]): { readonly ids: Int32Array; readonly matrices: SparseMatrix[] } {
		const { device, parallel } = this.model;
		let { ids } = text;
		const matrices = inputs.map(({ edge, rows: { rowsPerSample } }) => {
			const { module } = edge.from;
			const places = findImagePlaces(ids, sampleLengths(text), this.options.placeholders.get(module)!);
			checkImageRows(places, rowsPerSample, { module, place: this.options.name });
			ids = places.ids;
			return this.#own(placement(device, places, parallel.tp));
		});
		return { ids, matrices };
	}
}

/** The mask_T as weights of the tokens' losses, of which a microbatch's mean has weight `loss`. */
function tokenWeights(mask: Tensor, microbatch: Microbatch, { loss }: MicrobatchWeights): Tensor {
	const tokens = lossTokens(microbatch);
	if (loss === tokens) return mask.share();
	return Tensor.from(
		mask.device,
		microbatch.lossMask.map((counts) => counts * (loss / tokens)),
	);
}
