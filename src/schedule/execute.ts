/** The interpreter of a step's actions: the only place that runs passes and transfers. */
import { type StepTimers, timed } from "../observe/timers.ts";
import type { Edge, Rows } from "../parallel/index.ts";
import type { Tensor } from "../tensor/index.ts";
import {
	type Action,
	type Chunk,
	chunkName,
	languageChunk,
	type PassAction,
	type TransferAction,
	type WeightGradientAction,
} from "./actions.ts";
import type { ModulePasses, Pass } from "./pass.ts";

/** A rank's modules and edges, and the hooks that observe the execution. */
export interface Equipment {
	/** Modules of this rank. */
	readonly modules: Readonly<Partial<Record<Chunk["module"], ModulePasses>>>;
	/** Edges with an end here, by the chunk of the language model that they enter. */
	readonly edges: ReadonlyMap<number, Edge>;
	/** Starts the reduction of a module's gradients over its replicas. */
	readonly reduce: (module: Chunk["module"]) => void;
	/** Called when this rank begins (true) and ceases (false) to wait for rows or gradients. */
	readonly waits?: (waiting: boolean) => void;
	readonly timers?: StepTimers | undefined;
	/** Called before every action. */
	readonly observe?: ((action: Action) => void) | undefined;
}

/** Executes a rank's actions in order. After an error the memory of all passes is released. */
export function execute(actions: readonly Action[], equipment: Equipment): void {
	using execution = new Execution(equipment, backwardEdges(actions), latePasses(actions));
	for (const action of actions) {
		equipment.observe?.(action);
		execution.run(action);
	}
	execution.settle();
}

/** Chunks whose edge carries gradients back. */
function backwardEdges(actions: readonly Action[]): ReadonlySet<number> {
	const transfers = actions.filter((action): action is TransferAction => "direction" in action);
	return new Set(transfers.filter(({ direction }) => direction === "backward").map(({ to }) => to.index));
}

/** Keys of the passes whose weight gradients have an action of their own. */
function latePasses(actions: readonly Action[]): ReadonlySet<string> {
	const late = actions.filter((action): action is WeightGradientAction => action.kind === "weight gradient");
	return new Set(late.map(({ chunk, microbatch }) => keyOf(chunk, microbatch)));
}

class Execution implements Disposable {
	/** Passes in flight or with weight gradients to come, by chunk and microbatch, as all maps here are. */
	readonly #passes = new Map<string, Pass>();
	/** Received rows that no pass has begun with, and gradients received (incoming) or computed (outgoing) and not yet passed on. */
	readonly #rows = new Map<string, Rows>();
	readonly #incoming = new Map<string, Tensor | null>();
	readonly #outgoing = new Map<string, Tensor | null>();

	constructor(
		readonly equipment: Equipment,
		readonly returning: ReadonlySet<number>,
		readonly late: ReadonlySet<string>,
	) {}

	run(action: Action): void {
		switch (action.kind) {
			case "forward":
				this.#forward(action);
				break;
			case "backward":
				this.#backward(action);
				break;
			case "weight gradient":
				this.#weightGradient(action);
				break;
			case "send":
				if (action.direction === "forward") this.#sendRows(action);
				else this.#sendGradient(action);
				break;
			case "receive":
				if (action.direction === "forward") this.#receiveRows(action);
				else this.#receiveGradient(action);
				break;
			case "reduce":
				this.equipment.reduce(action.module);
				break;
		}
	}

	settle(): void {
		timed(this.equipment.timers, "forward-send", () => {
			for (const edge of this.equipment.edges.values()) edge.settle();
		});
	}

	#forward({ chunk, microbatch, node }: PassAction): void {
		const key = keyOf(chunk, microbatch);
		const done = timed(this.equipment.timers, "forward-compute", () => {
			const begun = this.#passes.get(key);
			const pass = begun ?? this.#module(chunk).begin(chunk.index, microbatch, take(this.#rows, key) ?? null);
			this.#passes.set(key, pass);
			return pass.forward(node);
		});
		const pass = this.#passes.get(key)!;
		if (done && !pass.returns && pass.output === null) this.#finish(key);
	}

	#backward({ chunk, microbatch, node }: PassAction): void {
		const key = keyOf(chunk, microbatch);
		const late = this.late.has(key);
		const pass = this.#passes.get(key)!;
		const gradient = take(this.#incoming, keyOf(after(chunk), microbatch)) ?? null;
		const back = timed(this.equipment.timers, "backward-compute", () =>
			pass.backward(gradient, late ? "late" : "immediate", node),
		);
		if (back === "more") return;
		if (chunk.module === "language") this.#outgoing.set(key, back);
		if (!late) this.#finish(key);
	}

	#weightGradient({ chunk, microbatch, node }: WeightGradientAction): void {
		const key = keyOf(chunk, microbatch);
		timed(this.equipment.timers, "backward-compute", () => this.#passes.get(key)!.computeWeightGradients(node));
		if (node === undefined) this.#finish(key);
	}

	#finish(key: string): void {
		take(this.#passes, key)![Symbol.dispose]();
	}

	#sendRows({ to, microbatch }: TransferAction): void {
		const key = keyOf(before(to), microbatch);
		const pass = this.#passes.get(key)!;
		timed(this.equipment.timers, "forward-send", () =>
			this.#edge(to).sendForward(pass.output!, { returns: this.returning.has(to.index) }),
		);
		if (!pass.returns) this.#finish(key);
	}

	#receiveRows({ to, microbatch }: TransferAction): void {
		const module = this.#module(to);
		const expected = module.expected(to.index, microbatch);
		const beside = to.index > 0 && module.besides?.(microbatch) === true;
		const rows = this.#waiting("forward-recv", () =>
			this.#edge(to).receiveForward(expected, { returns: this.returning.has(to.index), beside }),
		);
		this.#rows.set(keyOf(to, microbatch), rows);
	}

	#sendGradient({ to, microbatch }: TransferAction): void {
		const gradient = take(this.#outgoing, keyOf(to, microbatch)) ?? null;
		timed(this.equipment.timers, "backward-send", () => this.#edge(to).sendBackward(gradient));
	}

	#receiveGradient({ to, microbatch }: TransferAction): void {
		this.#incoming.set(
			keyOf(to, microbatch),
			this.#waiting("backward-recv", () => this.#edge(to).receiveBackward()),
		);
	}

	#waiting<Result>(timer: "forward-recv" | "backward-recv", work: () => Result): Result {
		const { waits, timers } = this.equipment;
		waits?.(true);
		try {
			return timed(timers, timer, work);
		} finally {
			waits?.(false);
		}
	}

	#module({ module }: Chunk): ModulePasses {
		return this.equipment.modules[module]!;
	}

	#edge({ index }: Chunk): Edge {
		return this.equipment.edges.get(index)!;
	}

	[Symbol.dispose](): void {
		for (const pass of this.#passes.values()) pass[Symbol.dispose]();
		for (const { rows, beside } of this.#rows.values()) for (const owned of [rows, beside]) owned?.[Symbol.dispose]();
		for (const gradient of [...this.#incoming.values(), ...this.#outgoing.values()]) gradient?.[Symbol.dispose]();
		for (const edge of this.equipment.edges.values()) edge[Symbol.dispose]();
	}
}

function keyOf(chunk: Chunk, microbatch: number): string {
	return `${chunkName(chunk)} ${microbatch}`;
}

/** The chunk whose rows enter `to`. */
function before(to: Chunk): Chunk {
	return to.index === 0 ? { module: "encoder", index: 0 } : languageChunk(to.index - 1);
}

function after({ module, index }: Chunk): Chunk {
	return languageChunk(module === "encoder" ? 0 : index + 1);
}

function take<Value>(from: Map<string, Value>, key: string): Value | undefined {
	const value = from.get(key);
	from.delete(key);
	return value;
}
