/**
 * Reverse mode. An operation runs its forward kernel and records one backward closure with what it saved. A tape holds
 * one microbatch's records in segments, the unit a schedule orders; several tapes may be live and their segments run
 * backward interleaved. A segment that runs backward with late weight gradients computes the gradients of its inputs and
 * keeps a list of tasks; drain() runs them, in the order in which backward met them.
 */

import type { Device } from "../native/device.ts";
import { debug, debugging } from "../system/debug.ts";
import { GradientSlot } from "./gradient.ts";
import type { Parameter } from "./parameter.ts";
import type { FloatDtype, Tensor } from "./tensor.ts";

/** When a backward pass computes weight gradients: beside the gradients of inputs, or when its segments are drained. */
export type WeightGradients = "immediate" | "late";

interface Entry {
	readonly name: string;
	readonly outputs: readonly GradientSlot[];
	readonly held: readonly Disposable[];
	readonly parameters: Parameter[];
	readonly backward: (gradients: readonly (Tensor | null)[]) => void;
}

/** A weight gradient that is still to be computed. */
interface Task {
	readonly held: readonly Tensor[];
	readonly run: () => void;
	/** Parameters whose operation is done with this task. */
	readonly parameters: Parameter[];
}

export interface TapeSegment {
	readonly name: string;
	readonly entries: Entry[];
	/** In the order in which backward met them. */
	readonly tasks: Task[];
}

/** The operation whose backward is running. */
interface Running {
	readonly segment: TapeSegment;
	readonly entry: Entry;
	readonly weightGradients: WeightGradients;
}

/** Description of an operation for the tape. */
export interface Operation {
	readonly name: string;
	/** Outputs that may receive gradients, as made by Tape.output. */
	readonly outputs: readonly Tensor[];
	/** Tensors backward reads; the tape shares them (the caller still disposes its own). */
	readonly keep?: readonly (Tensor | null)[];
	/** Objects made for backward alone; the tape takes them over. */
	readonly own?: readonly (Disposable | null)[];
	/** Parameters whose gradients backward adds to. */
	readonly parameters?: readonly (Parameter | null)[];
	/** Gradients of the outputs in order (null: no gradient came). The tape releases them and what it held afterwards. */
	readonly backward: (gradients: readonly (Tensor | null)[]) => void;
}

/** Counts what still has to add to the gradient of each parameter. */
class Uses {
	readonly #left = new Map<Parameter, number>();

	constructor(private readonly onLast: ((parameter: Parameter) => void) | undefined) {}

	add(parameters: readonly Parameter[]): void {
		for (const parameter of parameters) this.#left.set(parameter, (this.#left.get(parameter) ?? 0) + 1);
	}

	/** Counts one use less of each parameter, and empties the list. */
	finish(parameters: Parameter[]): void {
		for (const parameter of parameters.splice(0)) {
			const left = this.#left.get(parameter)! - 1;
			this.#left.set(parameter, left);
			if (left === 0) this.onLast?.(parameter);
		}
	}

	get parameters(): Parameter[] {
		return [...this.#left.keys()];
	}
}

export interface TapeOptions {
	/** False for inference. */
	readonly recording: boolean;
	/** Whether dropout drops and routers count tokens; default: when recording. */
	readonly training?: boolean;
	/** A second forward of the same data (recomputation), whose side effects, such as counting routed tokens, are done. */
	readonly replaying?: boolean;
	/** Values of `once`, in order, that a later second forward reads. */
	readonly kept?: Tensor[];
	/** The values of `once` of the first forward, which a second forward takes in order. */
	readonly earlier?: Tensor[];
	/** Called when every recorded operation that uses a trainable parameter has added to its gradient. */
	readonly onGradient?: (parameter: Parameter) => void;
	/** The tape whose backward pass records this one (recomputation): uses and late tasks of this one are its own. */
	readonly outer?: Tape;
}

export class Tape {
	readonly segments: TapeSegment[] = [];
	readonly #uses: Uses;
	#running: Running | null = null;

	constructor(
		readonly device: Device,
		readonly options: TapeOptions,
	) {
		this.#uses = options.outer ? options.outer.#uses : new Uses(options.onGradient);
	}

	get recording(): boolean {
		return this.options.recording;
	}

	get training(): boolean {
		return this.options.training ?? this.options.recording;
	}

	get replaying(): boolean {
		return this.options.replaying ?? false;
	}

	/**
	 * A value that depends on when it is computed, so that a second forward takes that of the first. The caller owns it, and
	 * does not change it.
	 */
	once(compute: () => Tensor): Tensor {
		const { kept, earlier } = this.options;
		const value = earlier ? earlier.shift()! : compute();
		kept?.push(value.share());
		return value;
	}

	/** Trainable parameters of its operations; a tape that does not record knows them too. */
	get parameters(): Parameter[] {
		return this.#uses.parameters;
	}

	/** Starts a segment: operations recorded from now on belong to it. */
	begin(name: string): TapeSegment {
		this.device.tracer?.scope(name);
		const segment: TapeSegment = { name, entries: [], tasks: this.#replayed?.segment.tasks ?? [] };
		this.segments.push(segment);
		return segment;
	}

	/**
	 * The output of an operation on `inputs`: given a gradient slot when the tape records and an input (or a trainable
	 * parameter) wants gradients, by default in the storage type of `value`. Takes over `value`.
	 */
	output(value: Tensor, wantsGradient: boolean, gradientDtype = value.dtype as FloatDtype): Tensor {
		if (!this.recording || !wantsGradient) return value;
		const output = value.withGradient(new GradientSlot(value.device, value.shape, gradientDtype));
		value[Symbol.dispose]();
		return output;
	}

	/** Records an operation; without a gradient-carrying output it only releases what it was given. */
	record(operation: Operation): void {
		const slots = operation.outputs.map((output) => output.gradient);
		const own = (operation.own ?? []).filter((item) => item !== null);
		const parameters = (operation.parameters ?? []).flatMap((used) => (used?.trainable ? [used.whole] : []));
		if (!this.recording || slots.every((slot) => slot === null)) {
			if (!this.recording) this.#uses.add(parameters);
			for (const item of own) item[Symbol.dispose]();
			return;
		}
		if (slots.some((slot) => slot === null)) throw new Error(`${operation.name} has an output without a gradient.`);
		const kept = (operation.keep ?? []).filter((tensor) => tensor !== null).map((tensor) => tensor.share());
		this.#uses.add(parameters);
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
	 * Runs `run` when a backward pass comes back to this point, before the backward of the operations recorded so far. `held` is
	 * released with it.
	 */
	onReturn(name: string, run: () => void, held: readonly Disposable[] = []): void {
		if (!this.recording) throw new Error(`${name}: a tape that does not record has no way back.`);
		const segment = this.segments.at(-1) ?? this.begin("all");
		segment.entries.push({ name, outputs: [], held, parameters: [], backward: run });
	}

	/**
	 * y of `compute` on a tape for the second forward of what runs backward now: uses of parameters and late weight gradients of
	 * that tape are this one's. `earlier`: values of the first forward's `once`.
	 */
	computeAgain(compute: (again: Tape) => Tensor, earlier: Tensor[]): { readonly again: Tape; readonly y: Tensor } {
		const { training } = this;
		const again = new Tape(this.device, { recording: true, training, replaying: true, earlier, outer: this });
		again.begin(`${this.#running!.segment.name} again`);
		const y = compute(again);
		this.#continueScope();
		return { again, y };
	}

	/**
	 * Called by an operation's backward for its weight gradient, which reads `reads`: runs now, or when its segment is
	 * drained. `hides`: it may also wait for a sum over ranks, whose time it hides (drainBesideSum), or for the end of its
	 * segment.
	 */
	weightGradient(
		reads: readonly Tensor[],
		run: () => void,
		{ hides = false }: { readonly hides?: boolean } = {},
	): void {
		const { segment, weightGradients } = this.#running!;
		if (weightGradients === "immediate" && !hides) run();
		else segment.tasks.push({ held: reads.map((tensor) => tensor.share()), run, parameters: [] });
	}

	/** Called by an operation's backward while its sum over ranks is under way: runs the tasks that waited for one. */
	drainBesideSum(): void {
		const { segment, weightGradients } = this.#running!;
		if (weightGradients === "immediate") this.#runTasks(segment);
	}

	/** Runs every segment backward, last to first. Without `weightGradients`: as the tape whose backward records this one. */
	backward(weightGradients = this.#replayed?.weightGradients ?? "immediate"): void {
		// The operations recorded anew count their own uses of parameters, in place of those that the outer operation announced.
		if (this.#replayed) this.#uses.finish(this.#replayed.entry.parameters);
		for (const segment of this.segments.toReversed()) this.backwardSegment(segment, weightGradients);
		if (this.options.outer) this.options.outer.#continueScope();
	}

	/** Runs one segment backward. Its outputs' slots must hold their gradients. */
	backwardSegment(segment: TapeSegment, weightGradients: WeightGradients = "immediate"): void {
		this.device.tracer?.scope(`${segment.name} backward`);
		for (let entry = segment.entries.pop(); entry !== undefined; entry = segment.entries.pop()) {
			if (debugging(3)) debug(3, `backward ${segment.name} ${entry.name}`);
			this.#running = { segment, entry, weightGradients };
			const gradients = entry.outputs.map((slot) => slot.take());
			const before = segment.tasks.at(-1);
			if (entry.outputs.length === 0 || gradients.some((gradient) => gradient !== null)) entry.backward(gradients);
			for (const gradient of gradients) gradient?.[Symbol.dispose]();
			for (const item of entry.held) item[Symbol.dispose]();
			const last = segment.tasks.at(-1);
			if (last !== undefined && last !== before) last.parameters.push(...entry.parameters);
			else this.#uses.finish(entry.parameters);
		}
		if (weightGradients === "immediate") this.#runTasks(segment);
		this.#running = null;
	}

	/** Sets the tracer's scope to the segment that runs backward, as it was before another tape's operations. */
	#continueScope(): void {
		if (this.#running !== null) this.device.tracer?.scope(`${this.#running.segment.name} backward`);
	}

	/** The operation of the outer tape whose backward records this one. */
	get #replayed(): Running | null {
		const { outer } = this.options;
		return outer ? outer.#running : null;
	}

	/** Computes the weight gradients that are left, of one segment or of all, last to first; each lets go of what it read. */
	drain(segment?: TapeSegment): void {
		for (const one of segment ? [segment] : this.segments.toReversed()) {
			if (one.tasks.length === 0) continue;
			this.device.tracer?.scope(`${one.name} weight gradients`);
			this.#runTasks(one);
		}
	}

	#runTasks({ tasks }: TapeSegment): void {
		for (let task = tasks.shift(); task !== undefined; task = tasks.shift()) {
			task.run();
			for (const tensor of task.held) tensor[Symbol.dispose]();
			this.#uses.finish(task.parameters);
		}
	}

	/** Releases everything without running it: after an error, or when a loss is not finite. */
	discard(): void {
		this.#running = null;
		for (const segment of this.segments) {
			for (const entry of segment.entries.splice(0)) {
				for (const slot of entry.outputs) slot.clear();
				for (const item of entry.held) item[Symbol.dispose]();
			}
			// Late weight gradients of a second forward are the outer tape's.
			if (this.options.outer) continue;
			for (const { held } of segment.tasks.splice(0)) for (const tensor of held) tensor[Symbol.dispose]();
		}
	}
}
