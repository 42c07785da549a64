/**
 * Reverse mode. An operation runs its forward kernel and records one backward closure with what it saved. A tape holds
 * one microbatch's records in segments, the unit a schedule orders; several tapes may be live and their segments run
 * backward interleaved. Weight gradients can be deferred: `backward` then computes input gradients only, and
 * flushWeightGradients the rest.
 */

import { debug, debugging } from "../native/debug.ts";
import type { Device } from "../native/device.ts";
import { GradientSlot } from "./gradient.ts";
import type { Parameter } from "./parameter.ts";
import type { FloatDtype, Tensor } from "./tensor.ts";

export type WeightGradients = "immediate" | "deferred";

interface Entry {
	readonly name: string;
	readonly outputs: readonly GradientSlot[];
	readonly held: readonly Disposable[];
	readonly parameters: readonly Parameter[];
	readonly backward: (gradients: readonly (Tensor | null)[]) => void;
}

interface Deferred {
	readonly held: readonly Tensor[];
	readonly run: () => void;
}

/** A weight gradient that waits for something to hide, with the parameters of its operation. */
interface Postponed extends Deferred {
	readonly parameters: Parameter[];
}

export interface Segment {
	readonly name: string;
	readonly entries: Entry[];
	readonly deferred: Deferred[];
	/** Trainable parameters of the operations that went backward and may have deferred their weight gradients. */
	readonly unfinished: Parameter[];
}

/** What an operation tells the tape about itself. */
export interface Operation {
	readonly name: string;
	/** Outputs that may receive gradients, as made by Tape.output. */
	readonly outputs: readonly Tensor[];
	/** Tensors backward reads; the tape shares them (the caller still disposes its own). */
	readonly keep?: readonly (Tensor | null)[];
	/** What was made for backward alone; the tape takes it over. */
	readonly own?: readonly (Disposable | null)[];
	/** Parameters whose gradients backward adds to. */
	readonly parameters?: readonly (Parameter | null)[];
	/** Gradients of the outputs in order (null: none came). The tape releases them and what it held afterwards. */
	readonly backward: (gradients: readonly (Tensor | null)[]) => void;
}

export class Tape {
	readonly segments: Segment[] = [];
	/** Recorded operations that still have to add to a parameter's gradient. */
	readonly #uses = new Map<Parameter, number>();
	readonly #postponed: Postponed[] = [];

	/**
	 * recording: false for inference. training: whether dropout drops and routers count tokens (default: when recording).
	 * replaying: a second forward of the same data (recomputation), whose side effects,
	 * such as counting routed tokens, have already happened. onGradient: called when every recorded operation that uses a
	 * trainable parameter has added to its gradient.
	 */
	constructor(
		readonly device: Device,
		readonly options: {
			readonly recording: boolean;
			readonly training?: boolean;
			readonly weightGradients?: WeightGradients;
			readonly replaying?: boolean;
			readonly onGradient?: (parameter: Parameter) => void;
		},
	) {}

	get recording(): boolean {
		return this.options.recording;
	}

	get training(): boolean {
		return this.options.training ?? this.options.recording;
	}

	get replaying(): boolean {
		return this.options.replaying ?? false;
	}

	/** Starts a segment: what is recorded from now on belongs to it. */
	begin(name: string): Segment {
		this.device.tracer?.scope(name);
		const segment: Segment = { name, entries: [], deferred: [], unfinished: [] };
		this.segments.push(segment);
		return segment;
	}

	/**
	 * The output of an operation on `inputs`: given a gradient slot when the tape records and an input (or a trainable
	 * parameter) wants gradients. Takes over `value`.
	 */
	output(value: Tensor, wantsGradient: boolean): Tensor {
		if (!this.recording || !wantsGradient) return value;
		const output = value.withGradient(new GradientSlot(value.device, value.shape, value.dtype as FloatDtype));
		value[Symbol.dispose]();
		return output;
	}

	/** Records an operation; without a gradient-carrying output it only releases what it was given. */
	record(operation: Operation): void {
		const slots = operation.outputs.map((output) => output.gradient);
		const own = (operation.own ?? []).filter((item) => item !== null);
		if (!this.recording || slots.every((slot) => slot === null)) {
			for (const item of own) item[Symbol.dispose]();
			return;
		}
		if (slots.some((slot) => slot === null)) throw new Error(`${operation.name} has an output without a gradient.`);
		const kept = (operation.keep ?? []).filter((tensor) => tensor !== null).map((tensor) => tensor.share());
		const parameters = (operation.parameters ?? []).filter((parameter) => parameter?.trainable ?? false) as Parameter[];
		for (const parameter of parameters) this.#uses.set(parameter, (this.#uses.get(parameter) ?? 0) + 1);
		const segment = this.segments.at(-1) ?? this.begin("all");
		segment.entries.push({
			name: operation.name,
			outputs: slots as GradientSlot[],
			held: [...kept, ...own],
			parameters,
			backward: operation.backward,
		});
	}

	/**
	 * Called by an operation's backward for its weight gradient, which reads `reads`: runs now, or when the segment's
	 * weight gradients are flushed.
	 */
	weightGradient(segment: Segment, reads: readonly Tensor[], run: () => void): void {
		if (this.options.weightGradients === "deferred") {
			segment.deferred.push({ held: reads.map((tensor) => tensor.share()), run });
		} else {
			run();
		}
	}

	/**
	 * The same for one that may run later in its segment: behind a sum over ranks that is under way, whose time it hides
	 * (runPostponed). At the end of the segment it runs in any case.
	 */
	postponeWeightGradient(segment: Segment, reads: readonly Tensor[], run: () => void): void {
		if (this.options.weightGradients === "deferred") this.weightGradient(segment, reads, run);
		else this.#postponed.push({ held: reads.map((tensor) => tensor.share()), run, parameters: [] });
	}

	/** Runs the weight gradients that were postponed, in the order in which they were. */
	runPostponed(): void {
		for (const { held, run, parameters } of this.#postponed.splice(0)) {
			run();
			for (const tensor of held) tensor[Symbol.dispose]();
			this.#finish(parameters);
		}
	}

	/** The segment operations are recorded into now. */
	get current(): Segment {
		return this.segments.at(-1) ?? this.begin("all");
	}

	/** Runs every segment backward, last to first, then the deferred weight gradients. */
	backward(): void {
		for (const segment of this.segments.toReversed()) this.backwardSegment(segment);
		for (const segment of this.segments.toReversed()) this.flushWeightGradients(segment);
	}

	/** Runs one segment backward. Its outputs' slots must hold their gradients. */
	backwardSegment(segment: Segment): void {
		this.device.tracer?.scope(`${segment.name} backward`);
		for (let entry = segment.entries.pop(); entry !== undefined; entry = segment.entries.pop()) {
			if (debugging(3)) debug(3, `backward ${segment.name} ${entry.name}`);
			const gradients = entry.outputs.map((slot) => slot.take());
			const postponed = this.#postponed.length;
			if (gradients.some((gradient) => gradient !== null)) entry.backward(gradients);
			for (const gradient of gradients) gradient?.[Symbol.dispose]();
			for (const item of entry.held) item[Symbol.dispose]();
			if (this.options.weightGradients === "deferred") segment.unfinished.push(...entry.parameters);
			else if (this.#postponed.length > postponed) this.#postponed.at(-1)!.parameters.push(...entry.parameters);
			else this.#finish(entry.parameters);
		}
		this.runPostponed();
	}

	/** Runs the weight gradients a segment deferred, in the order backward met them. */
	flushWeightGradients(segment: Segment): void {
		for (const { held, run } of segment.deferred.splice(0)) {
			run();
			for (const tensor of held) tensor[Symbol.dispose]();
		}
		this.#finish(segment.unfinished.splice(0));
	}

	/** One use less of each. */
	#finish(parameters: readonly Parameter[]): void {
		for (const parameter of parameters) {
			const left = this.#uses.get(parameter)! - 1;
			this.#uses.set(parameter, left);
			if (left === 0) this.options.onGradient?.(parameter);
		}
	}

	/** Releases everything without running it: after an error, or when a loss is not finite. */
	discard(): void {
		for (const segment of this.segments) {
			for (const entry of segment.entries.splice(0)) {
				for (const slot of entry.outputs) slot.clear();
				for (const item of entry.held) item[Symbol.dispose]();
			}
			for (const { held } of segment.deferred.splice(0)) for (const tensor of held) tensor[Symbol.dispose]();
		}
		for (const { held } of this.#postponed.splice(0)) for (const tensor of held) tensor[Symbol.dispose]();
	}
}
