/** One microbatch's pass through a model chunk of the language model: image rows or hidden states in, hidden states or a loss out. */

import { DeviceInput } from "../data/device-input.ts";
import { type Microbatch, sampleLengths } from "../data/microbatch.ts";
import type { LanguageView, StepGuest, Variant } from "../guests/guest.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { ForwardInput, ModelChunk, Observer } from "../models/language/model-chunk.ts";
import type { Nodes } from "../models/language/nodes.ts";
import { PooledBalancing, type PooledLinks } from "../models/language/pooled-balancing.ts";
import { checkImageRows, findImagePlaces, placement, placingRows } from "../models/vision/merge.ts";
import type { Rows } from "../parallel/index.ts";
import type { Backward, Input, Pass } from "../schedule/pass.ts";
import { UserError } from "../system/errors.ts";
import {
	cast,
	type FloatDtype,
	GradientSlot,
	type Parameter,
	type SparseMatrix,
	Tape,
	type TapeSegment,
	type Tensor,
	type TokenSlice,
	type WeightGradients,
} from "../tensor/index.ts";
import { companionsOf, LanguageHead, type WeighedLoss } from "./language-head.ts";
import type { Losses } from "./losses.ts";

/** Options of a language model pass. */
export interface LanguagePassOptions {
	/** Ids of the tokens that encoders' rows replace, by the encoder's name. */
	readonly placeholders: ReadonlyMap<string, number>;
	/** Index of the microbatch among those of this rank's step. */
	readonly microbatch: number;
	/** The part of the model that the microbatch runs; absent or null: all of it. */
	readonly variant?: Variant | null;
	/** Guests that take part in the pass. */
	readonly guests: readonly StepGuest[];
	/** Philox key of the step's dropout masks. */
	readonly dropoutKey: number;
	/** Indices of the microbatch's tokens in the step's global batch. */
	readonly tokens: TokenSlice;
	/** The chunk's links for the pooled balancing loss; null: the model has none. */
	readonly pooled: PooledLinks | null;
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
	/** Gradients of the inputs' rows, and the rows' type; null: not wanted. */
	readonly #slots: ({ readonly slot: GradientSlot; readonly dtype: FloatDtype } | null)[] = [];
	#output: Rows | null = null;
	/** Losses that are differentiated, and their gradients; empty on a chunk without the output layer. */
	#losses: readonly WeighedLoss[] = [];
	readonly #pooled: PooledBalancing | null;
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
		const { onGradient, training, pooled } = options;
		this.#tape = new Tape(model.device, { recording: training, ...(onGradient && { onGradient }) });
		this.#pooled = pooled && training ? this.#own(new PooledBalancing(model.config, model.device, pooled)) : null;
		for (const { rows } of inputs) this.#owned.push(rows.rows, ...(rows.companions ?? []));
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
		const input = this.#own(new DeviceInput(device, { ...microbatch, ids }, parallel));
		const placing = {
			matrices,
			ranks: parallel.tokens,
			config: model.config,
			own: <O extends Disposable>(o: O) => this.#own(o),
		};
		const features = placingRows(this.#tape, leaves, placing);
		const weights = losses.weights.of(microbatch);
		const plain = { ...input.forward(options.dropoutKey, options.tokens), routerWeight: weights.routers };
		const forward = { ...plain, ...features, masks: options.variant?.masks, pooled: this.#pooled };
		const rows = inputs.map((input) => input.rows.rows);
		const view: Omit<LanguageView, "companions"> = {
			...{ microbatch: options.microbatch, text: microbatch, chunk, place: model.chunks.indexOf(chunk) },
			...{ weight: weights.loss, observe: options.observe, own: (owned) => this.#own(owned) },
			input: (tape) => ({ ...plain, ...placingRows(tape, rows, placing) }),
		};
		const before = chunk.segment.embeds ? null : leaves[0]!;
		const companions = companionsOf(options.guests, view, before && inputs[0]!.rows.companions);
		const observe = this.#observer({ ...view, forward }, companions, before);
		using hidden = yield* chunk.hidden(this.#tape, forward, before, observe);
		if (!chunk.segment.hasHead) {
			const sent = [...companions.values()].flat();
			this.#output = { rows: this.#own(hidden.share()), rowsPerSample: [], companions: sent };
			this.#pooled?.pool();
			return;
		}
		using head = new LanguageHead(model, this.#tape, { ...view, hidden, forward, input });
		this.#losses = head.losses(companions, losses);
		this.#pooled?.pool();
	}

	/** Calls the pass's own observer and the guests', those with the chunk's input too. */
	#observer(
		view: Omit<LanguageView, "companions" | "input"> & { readonly forward: ForwardInput },
		companions: ReadonlyMap<StepGuest, readonly Tensor[]>,
		entered: Tensor | null,
	): Observer | undefined {
		const { observe } = this.options;
		const guests = [...companions]
			.map(([guest, own]) => guest.observer?.({ ...view, tape: this.#tape, companions: own }) ?? null)
			.filter((observer) => observer !== null);
		if (guests.length === 0) return observe;
		if (entered) for (const observer of guests) observer("entered", entered);
		return (name, value) => {
			for (const observer of [...guests, observe]) observer?.(name, value);
		};
	}

	/** A leaf of this tape; the sender's backward pass continues from its gradient. */
	#leaf({ rows: { rows }, returns }: Input): Tensor {
		const wanted = this.options.training && returns;
		const { dtype } = this.model.config;
		const slot = wanted ? new GradientSlot(this.model.device, rows.shape, dtype) : null;
		this.#slots.push(slot && { slot, dtype: rows.dtype as FloatDtype });
		const own = rows.dtype === dtype ? rows : this.#own(cast(rows, dtype));
		return this.#own(own.withGradient(slot));
	}

	#own<Owned extends Disposable>(owned: Owned): Owned {
		this.#owned.push(owned);
		return owned;
	}

	get returns(): boolean {
		return this.options.training;
	}

	backward(gradient: Tensor | null, weightGradients: WeightGradients, node?: number): Backward {
		if (node === undefined || node === this.#ends.length - 1) this.#begin(gradient);
		if (node === undefined) this.#tape.backward(weightGradients);
		else for (const segment of this.#segments(node).reverse()) this.#tape.backwardSegment(segment, weightGradients);
		if (node !== undefined && node > 0) return { finished: false };
		// Late weight gradients keep what they read alive themselves.
		this.#release();
		const gradients = this.#slots.map((input) => {
			const gradient = input?.slot.take() ?? null;
			if (gradient === null || gradient.dtype === input!.dtype) return gradient;
			using _gradient = gradient;
			return cast(gradient, input!.dtype);
		});
		return { finished: true, gradients };
	}

	/** Seeds the backward pass: sets the gradients of the outputs. */
	#begin(gradient: Tensor | null): void {
		this.#pooled?.settle(this.#tape);
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
		for (const input of this.#slots) input?.slot.clear();
		this.#release();
	}

	#release(): void {
		for (const owned of this.#owned.splice(0)) owned[Symbol.dispose]();
	}

	/** The text's ids without the tokens that stand for rows, and the matrices that place the rows. */
	#place(text: Microbatch, inputs: readonly Input[]): { readonly ids: Int32Array; readonly matrices: SparseMatrix[] } {
		const { device, parallel, config } = this.model;
		const hasRows = inputs.some(({ rows: { rows } }) => rows.rows > 0);
		if (hasRows && config.attention.mropeSection !== null && text.positions === undefined) {
			throw new UserError("mrope-section: these data do not say where their pictures' tokens are in the picture.");
		}
		let { ids } = text;
		const matrices = inputs.map(({ edge, rows: { rowsPerSample } }) => {
			const { module } = edge.from;
			const places = findImagePlaces(ids, sampleLengths(text), this.options.placeholders.get(module)!);
			checkImageRows(places, rowsPerSample, { module, place: `microbatch ${this.options.microbatch}` });
			ids = places.ids;
			return this.#own(placement(device, places, parallel.tokens));
		});
		return { ids, matrices };
	}
}
