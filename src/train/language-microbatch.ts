/** One microbatch through the language model: forward and backward, image rows in, their gradient out. */
import { type Microbatch, sampleLengths } from "../data/microbatch.ts";
import type { HybridModel, Observer } from "../models/hybrid/model.ts";
import { checkImageRows, findImagePlaces, placeImageRows, placement } from "../models/mimo/merge.ts";
import { timed } from "../observe/timers.ts";
import { GradientSlot } from "../tensor/gradient.ts";
import { Tape } from "../tensor/tape.ts";
import type { FloatDtype, Tensor } from "../tensor/tensor.ts";
import { DeviceInput } from "./device-input.ts";
import { tokenLoss } from "./language-loss.ts";
import type { LossAccumulator } from "./loss.ts";
import type { StepPlace } from "./schedule.ts";

/** Image rows of a microbatch as they come from the encoder, in this process or over the bridge. */
export interface ReceivedRows {
	/** [Σ rowsPerSample, H], on every tensor-parallel rank. */
	readonly rows: Tensor;
	readonly rowsPerSample: readonly number[];
	/** Whether the encoder trains. */
	readonly wantsGradient: boolean;
}

/** Adds to the embedding of this rank's tokens. */
type AddToEmbedding = (tape: Tape, embedded: Tensor) => Tensor;

/**
 * Text alone. `addToEmbedding` adds to the embedding of this rank's tokens. Observed are the model's values and
 * "per_token_loss".
 */
export function trainText(
	model: HybridModel,
	microbatch: Microbatch,
	place: StepPlace,
	losses: LossAccumulator,
	observe: Observer = () => {},
	addToEmbedding?: AddToEmbedding,
): void {
	const { onGradient, timers } = place;
	const tape = new Tape(model.device, { recording: true, ...(onGradient && { onGradient }) });
	using input = new DeviceInput(model.device, microbatch, model.parallel.tp);
	using loss = timed(timers, "forward-compute", () => lossOf(tape, model, input, place, observe, addToEmbedding));
	losses.add(loss, input.mask);
	// The loss is Σ mask·loss: the gradient of a token's loss is its mask.
	loss.gradient?.accumulate(input.mask.share());
	timed(timers, "backward-compute", () => tape.backward());
}

/** The same forward only. */
export function evaluateText(
	model: HybridModel,
	microbatch: Microbatch,
	losses: LossAccumulator,
	observe: Observer = () => {},
	addToEmbedding?: AddToEmbedding,
): void {
	const tape = new Tape(model.device, { recording: false });
	using input = new DeviceInput(model.device, microbatch, model.parallel.tp);
	using loss = lossOf(tape, model, input, { dropoutKey: 0, firstToken: 0 }, observe, addToEmbedding);
	losses.add(loss, input.mask);
}

/** Loss_T of every token. */
function lossOf(
	tape: Tape,
	model: HybridModel,
	input: DeviceInput,
	place: StepPlace,
	observe: Observer,
	addToEmbedding: AddToEmbedding | undefined,
): Tensor {
	const forward = input.forward(place.dropoutKey, place.firstToken);
	const add = addToEmbedding && { addToEmbedding: (embedded: Tensor) => addToEmbedding(tape, embedded) };
	using logits = model.forward(tape, { ...forward, ...add }, observe);
	const loss = tokenLoss(tape, model, logits, input.labels);
	observe("per_token_loss", loss);
	return loss;
}

/** Text, its image token, and what messages call it. */
export interface TextWithPlaces {
	readonly text: Microbatch;
	readonly imageTokenId: number;
	/** Such as "microbatch 3". */
	readonly name: string;
}

/**
 * Text with image rows at its image tokens. Returns the gradient of the rows, or null where none is wanted; the receiver
 * disposes it. Rows that do not match the image tokens are an error that names the sample.
 */
export function trainTextWithImages(
	model: HybridModel,
	microbatch: TextWithPlaces,
	received: ReceivedRows,
	place: StepPlace,
	losses: LossAccumulator,
	observe?: Observer,
): Tensor | null {
	const { device, parallel } = model;
	const { rows } = received;
	const places = checkedPlaces(microbatch, received.rowsPerSample);
	// A leaf of this tape: the encoder's own goes on from its gradient.
	const slot = received.wantsGradient ? new GradientSlot(device, rows.shape, rows.dtype as FloatDtype) : null;
	using leaf = rows.withGradient(slot);
	using matrix = placement(device, places, parallel.tp);
	trainText(model, { ...microbatch.text, ids: places.ids }, place, losses, observe, (tape, embedded) =>
		placeImageRows(tape, embedded, leaf, matrix, parallel.tp),
	);
	return slot?.take() ?? null;
}

/** The same forward only. */
export function evaluateTextWithImages(
	model: HybridModel,
	microbatch: TextWithPlaces,
	received: Omit<ReceivedRows, "wantsGradient">,
	losses: LossAccumulator,
	observe?: Observer,
): void {
	const { device, parallel } = model;
	const places = checkedPlaces(microbatch, received.rowsPerSample);
	using matrix = placement(device, places, parallel.tp);
	evaluateText(model, { ...microbatch.text, ids: places.ids }, losses, observe, (tape, embedded) =>
		placeImageRows(tape, embedded, received.rows, matrix, parallel.tp),
	);
}

function checkedPlaces({ text, imageTokenId, name }: TextWithPlaces, rowsPerSample: readonly number[]) {
	const places = findImagePlaces(text.ids, sampleLengths(text), imageTokenId);
	checkImageRows(places, rowsPerSample, name);
	return places;
}
