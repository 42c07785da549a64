/** One microbatch through a stage of the language model: rows or hidden states in, hidden states or a loss out. */

import { DeviceInput } from "../data/device-input.ts";
import { type Microbatch, sampleLengths } from "../data/microbatch.ts";
import type { Sampled } from "../elastic/router/router.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { Nodes } from "../models/hybrid/nodes.ts";
import type { ForwardInput, HybridStage, Observer } from "../models/hybrid/stage.ts";
import { checkImageRows, findImagePlaces, placeImageRows, placement } from "../models/vision/merge.ts";
import type { Rows } from "../parallel/edge.ts";
import type { Pass } from "../schedule/pass.ts";
import { GradientSlot } from "../tensor/gradient.ts";
import type { SparseMatrix } from "../tensor/ops/spmm.ts";
import type { Parameter } from "../tensor/parameter.ts";
import { type Segment, Tape, type WeightGradients } from "../tensor/tape.ts";
import { axpby, type FloatDtype, Tensor } from "../tensor/tensor.ts";
import type { TokenSlice } from "../tensor/token-slice.ts";
import { distillationLoss, type Teacher, teacherHidden } from "./distillation.ts";
import { tokenLoss } from "./language-loss.ts";
import {
	budgetLossName,
	distillationLossName,
	distillationLossOf,
	elasticLosses,
	type Losses,
	lossTokens,
} from "./losses.ts";
import { forEachMtpDepth } from "./mtp-loss.ts";

/** Arguments of a pass beside its microbatch. */
export interface LanguagePassOptions {
	/** null: text alone. */
	readonly imageTokenId: number | null;
	/** The microbatch's sample of an elastic model; null: the model as it is. */
	readonly elastic: Sampled | null;
	/** Draws the microbatch's logits to its own; null: it learns from labels alone. */
	readonly teacher: Teacher | null;
	/** Name of the microbatch in messages, such as "microbatch 3". */
	readonly name: string;
	/** Key of the step's dropout masks. */
	readonly dropoutKey: number;
	/** The microbatch's tokens among those of the step's global batch. */
	readonly tokens: TokenSlice;
	/** Whether it goes backward; if not, dropout is off and routers do not count. */
	readonly training: boolean;
	/** Whether the gradient of what enters is wanted. */
	readonly wantsGradient: boolean;
	/** Called when every gradient of a parameter from this pass is added. */
	readonly onGradient?: (parameter: Parameter) => void;
	/** Observes the model's values and "per_token_loss". */
	readonly observe?: Observer | undefined;
}

export class LanguagePass implements Pass {
	readonly #tape: Tape;
	readonly #owned: Disposable[] = [];
	/** Gradient of the rows that enter; null: the gradient is not wanted. */
	#slot: GradientSlot | null = null;
	#output: Rows | null = null;
	/** Losses of every token, and the weight of a token's loss as its gradient; empty where the stage has no head. */
	readonly #losses: { readonly loss: Tensor; readonly gradient: Tensor }[] = [];
	readonly #nodes: Nodes<void>;
	/** Number of the tape's segments at the end of every node. */
	readonly #ends: number[] = [];

	/**
	 * `entered` (taken over): image rows of the first stage, or the stage before's hidden states. Going forward adds to `losses`.
	 * Image rows that do not match the image tokens are a UserError that names the sample.
	 */
	constructor(
		readonly model: HybridModel,
		readonly stage: HybridStage,
		microbatch: Microbatch,
		entered: Rows | null,
		losses: Losses,
		private readonly options: LanguagePassOptions,
	) {
		const { onGradient, training } = options;
		this.#tape = new Tape(model.device, { recording: training, ...(onGradient && { onGradient }) });
		if (entered) this.#owned.push(entered.rows, ...(entered.beside ? [entered.beside] : []));
		this.#nodes = this.#forward(microbatch, entered, losses);
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

	*#forward(microbatch: Microbatch, entered: Rows | null, losses: Losses): Nodes<void> {
		const { model, stage, options } = this;
		const { device, parallel } = model;
		const leaf = entered && this.#leaf(entered.rows);
		const places = stage.segment.embeds && entered ? this.#places(microbatch, entered.rowsPerSample) : null;
		const text = places ? { ...microbatch, ids: places.ids } : microbatch;
		const input = this.#own(new DeviceInput(device, text, parallel.tp));
		const matrix = places && this.#own(placement(device, places, parallel.tp));
		const images = matrix && {
			addToEmbedding: (embedded: Tensor) => placeImageRows(this.#tape, embedded, leaf!, matrix, parallel.tp),
		};
		const { elastic } = options;
		const plain = input.forward(options.dropoutKey, options.tokens);
		const forward = { ...plain, ...images, masks: elastic?.masks };
		const taught = options.teacher && this.#own(this.#teach(options.teacher, plain, entered, matrix));
		using hidden = yield* stage.hidden(this.#tape, forward, places ? null : leaf, options.observe);
		if (!stage.segment.hasHead) {
			this.#output = { rows: this.#own(hidden.share()), rowsPerSample: [], beside: taught };
			return;
		}
		const { observe } = options;
		forEachMtpDepth(this.#tape, stage, microbatch, hidden, forward, observe, (predicted, target) => {
			const { name, labels, meanMask, gradient } = this.#own(target);
			const watch = observe && ((value: string, logits: Tensor) => observe(`${target.place}.${value}`, logits));
			losses.add(this.#loss(predicted, labels, gradient, watch), meanMask, name);
		});
		const loss = taught
			? this.#taughtLoss(options.teacher!, taught, hidden, input, losses)
			: this.#loss(hidden, input.labels, input.mask, observe);
		observe?.("per_token_loss", loss);
		losses.add(loss, input.mask);
		if (elastic === null) return;
		losses.addShared(elastic.loss.value, lossTokens(microbatch), budgetLossName);
		const kind = elastic.draw.budget.parent ? elasticLosses.parent : elasticLosses.other;
		if (losses.names.includes(kind)) losses.add(loss, input.mask, kind);
	}

	/** The loss_T of every token from normed hidden states; `gradient`: weight of each token's loss. */
	#loss(normed: Tensor, labels: Tensor, gradient: Tensor, observe?: Observer): Tensor {
		using logits = this.stage.logits(this.#tape, normed, observe);
		const loss = this.#own(tokenLoss(this.#tape, this.model, logits, labels));
		this.#losses.push({ loss, gradient });
		return loss;
	}

	/** The teacher's hidden states, of the same image rows or of what its stage before has sent. */
	#teach(teacher: Teacher, plain: ForwardInput, entered: Rows | null, matrix: SparseMatrix | null): Tensor {
		const { tp } = this.model.parallel;
		const input = (tape: Tape): ForwardInput => ({
			...plain,
			...(matrix && {
				addToEmbedding: (embedded: Tensor) => placeImageRows(tape, embedded, entered!.rows, matrix, tp),
			}),
		});
		return teacherHidden(teacher, this.model.stages.indexOf(this.stage), input, entered?.beside ?? null);
	}

	/** The language model's loss_T, whose weight is the teacher's rest 1 − α, beside the divergence from the teacher, of weight α. */
	#taughtLoss(teacher: Teacher, taught: Tensor, normed: Tensor, input: DeviceInput, losses: Losses): Tensor {
		const { alpha } = teacher;
		using logits = this.stage.logits(this.#tape, normed, this.options.observe);
		const weighted = (weight: number) => {
			const gradient = this.#own(Tensor.empty(this.model.device, input.mask.shape));
			axpby(input.mask, gradient, weight, 0);
			return gradient;
		};
		// A loss without a gradient is computed on a tape that records nothing.
		const own = alpha < 1 ? this.#tape : new Tape(this.model.device, { recording: false });
		const loss = this.#own(tokenLoss(own, this.model, logits, input.labels));
		if (alpha < 1) this.#losses.push({ loss, gradient: weighted(1 - alpha) });
		const divergence = this.#own(distillationLoss(this.#tape, teacher, taught, logits));
		this.#losses.push({ loss: divergence, gradient: weighted(alpha) });
		losses.add(divergence, input.mask, distillationLossName);
		const { elastic } = this.options;
		if (elastic) losses.add(divergence, input.mask, distillationLossOf(elastic.draw.budget.value));
		return loss;
	}

	/** A leaf of this tape: the module that sent the rows continues the backward pass from its gradient. */
	#leaf(rows: Tensor): Tensor {
		const { training, wantsGradient } = this.options;
		if (training && wantsGradient) {
			this.#slot = new GradientSlot(this.model.device, rows.shape, rows.dtype as FloatDtype);
		}
		return this.#own(rows.withGradient(this.#slot));
	}

	#own<Owned extends Disposable>(owned: Owned): Owned {
		this.#owned.push(owned);
		return owned;
	}

	get returns(): boolean {
		return this.options.training;
	}

	backward(gradient: Tensor | null, weightGradients: WeightGradients, node?: number): Tensor | null | "more" {
		if (node === undefined || node === this.#ends.length - 1) this.#begin(gradient);
		if (node === undefined) this.#tape.backward(weightGradients);
		else for (const segment of this.#segments(node).reverse()) this.#tape.backwardSegment(segment, weightGradients);
		if (node !== undefined && node > 0) return "more";
		// Late weight gradients hold what they read themselves.
		this.#release();
		return this.#slot?.take() ?? null;
	}

	/** Gives the outputs their gradients. */
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

	#segments(node: number): Segment[] {
		return this.#tape.segments.slice(this.#ends[node - 1] ?? 0, this.#ends[node]);
	}

	[Symbol.dispose](): void {
		this.#nodes.return();
		this.#tape.discard();
		this.#slot?.clear();
		this.#release();
	}

	#release(): void {
		for (const owned of this.#owned.splice(0)) owned[Symbol.dispose]();
	}

	#places(text: Microbatch, rowsPerSample: readonly number[]) {
		const places = findImagePlaces(text.ids, sampleLengths(text), this.options.imageTokenId!);
		checkImageRows(places, rowsPerSample, this.options.name);
		return places;
	}
}
