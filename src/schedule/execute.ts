/** The interpreter of a step's actions: the only place that runs passes and transfers. */
import { type StepTimers, timed } from "../observe/timers.ts";
import type { Edge, Rows } from "../parallel/index.ts";
import type { Tensor } from "../tensor/index.ts";
import {
	type Action,
	type Chunk,
	type ChunkEdge,
	type PassAction,
	sameChunk,
	type TransferAction,
	type WeightGradientAction,
} from "./actions.ts";
import type { ModulePasses, Pass } from "./pass.ts";

/** An edge with an end on this rank. */
export interface HeldEdge extends ChunkEdge {
	readonly edge: Edge;
}

/** A rank's modules and edges, and the hooks that observe the execution. */
export interface Equipment {
	/** Modules of this rank by name. */
	readonly modules: ReadonlyMap<string, ModulePasses>;
	/** Edges with an end here; those that enter a chunk in the order of its inputs. */
	readonly edges: readonly HeldEdge[];
	/** Starts the reduction of a module's gradients over its replicas. */
	readonly reduce: (module: string) => void;
	/** Called when this rank begins (true) and ceases (false) to wait for rows or gradients. */
	readonly waits?: (waiting: boolean) => void;
	readonly timers?: StepTimers | undefined;
	/** Called before every action. */
	readonly observe?: ((action: Action) => void) | undefined;
}

/** Executes a rank's actions in order. After an error the memory of all passes is released. */
export function execute(actions: readonly Action[], equipment: Equipment): void {
	using execution = new Execution(equipment, actions);
	for (const action of actions) {
		equipment.observe?.(action);
		execution.run(action);
	}
	execution.settle();
}

/** An edge, and what has come over it or is to go, by microbatch. */
interface Wire extends HeldEdge {
	/** Whether gradients go back over it. */
	readonly returns: boolean;
	/** Received rows that no pass has begun with. */
	readonly rows: Map<number, Rows>;
	/** Gradients received (incoming) or computed (outgoing) and not yet passed on. */
	readonly incoming: Map<number, Tensor | null>;
	readonly outgoing: Map<number, Tensor | null>;
}

/** A chunk that this rank passes microbatches through. */
interface HeldChunk {
	readonly chunk: Chunk;
	readonly module: ModulePasses;
	/** Passes in flight or with weight gradients to come, by microbatch. */
	readonly passes: Map<number, Pass>;
	/** Microbatches whose weight gradients have an action of their own. */
	readonly late: Set<number>;
	readonly enters: readonly Wire[];
	/** null: no edge leaves the chunk. */
	readonly leaves: Wire | null;
}

class Execution implements Disposable {
	readonly #wires: readonly Wire[];
	readonly #chunks: readonly HeldChunk[];

	constructor(
		readonly equipment: Equipment,
		actions: readonly Action[],
	) {
		const back = actions.filter(
			(action): action is TransferAction => "direction" in action && action.direction === "backward",
		);
		this.#wires = equipment.edges.map((held) => ({
			...held,
			returns: back.some((action) => sameEdge(action, held)),
			rows: new Map(),
			incoming: new Map(),
			outgoing: new Map(),
		}));
		const chunks: HeldChunk[] = [];
		for (const action of actions) {
			if (!("chunk" in action)) continue;
			const { chunk, microbatch } = action;
			let held = chunks.find((one) => sameChunk(one.chunk, chunk));
			if (held === undefined) {
				held = {
					...{ chunk, module: equipment.modules.get(chunk.module)!, passes: new Map(), late: new Set() },
					enters: this.#wires.filter(({ to }) => sameChunk(to, chunk)),
					leaves: this.#wires.find(({ from }) => sameChunk(from, chunk)) ?? null,
				};
				chunks.push(held);
			}
			if (action.kind === "weight gradient") held.late.add(microbatch);
		}
		this.#chunks = chunks;
	}

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
			for (const { edge } of this.equipment.edges) edge.settle();
		});
	}

	#forward({ chunk, microbatch, node }: PassAction): void {
		const held = this.#chunk(chunk);
		const done = timed(this.equipment.timers, "forward-compute", () => {
			const pass = held.passes.get(microbatch) ?? this.#begin(held, microbatch);
			held.passes.set(microbatch, pass);
			return pass.forward(node);
		});
		const pass = held.passes.get(microbatch)!;
		if (done && !pass.returns && pass.output === null) finish(held, microbatch);
	}

	#begin({ chunk, module, enters }: HeldChunk, microbatch: number): Pass {
		const inputs = enters.map((wire) => ({ edge: wire, rows: take(wire.rows, microbatch)!, returns: wire.returns }));
		return module.begin(chunk.index, microbatch, inputs);
	}

	#backward({ chunk, microbatch, node }: PassAction): void {
		const held = this.#chunk(chunk);
		const late = held.late.has(microbatch);
		const pass = held.passes.get(microbatch)!;
		const gradient = (held.leaves && take(held.leaves.incoming, microbatch)) ?? null;
		const back = timed(this.equipment.timers, "backward-compute", () =>
			pass.backward(gradient, late ? "late" : "immediate", node),
		);
		if (!back.finished) return;
		for (const [index, wire] of held.enters.entries()) wire.outgoing.set(microbatch, back.gradients[index] ?? null);
		if (!late) finish(held, microbatch);
	}

	#weightGradient({ chunk, microbatch, node }: WeightGradientAction): void {
		const held = this.#chunk(chunk);
		timed(this.equipment.timers, "backward-compute", () => held.passes.get(microbatch)!.computeWeightGradients(node));
		if (node === undefined) finish(held, microbatch);
	}

	#sendRows(action: TransferAction): void {
		const { edge, returns } = this.#wire(action);
		const held = this.#chunk(action.from);
		const pass = held.passes.get(action.microbatch)!;
		timed(this.equipment.timers, "forward-send", () => edge.sendForward(pass.output!, { returns }));
		if (!pass.returns) finish(held, action.microbatch);
	}

	#receiveRows(action: TransferAction): void {
		const { edge, returns, rows } = this.#wire(action);
		const { microbatch, from, to } = action;
		const { module } = this.#chunk(to);
		const expected = module.expected(action, microbatch);
		const companions = from.module === to.module ? (module.companions?.(microbatch) ?? []) : [];
		rows.set(
			microbatch,
			this.#waiting("forward-recv", () => edge.receiveForward(expected, { returns, companions })),
		);
	}

	#sendGradient(action: TransferAction): void {
		const { edge, outgoing } = this.#wire(action);
		const gradient = take(outgoing, action.microbatch) ?? null;
		timed(this.equipment.timers, "backward-send", () => edge.sendBackward(gradient));
	}

	#receiveGradient(action: TransferAction): void {
		const { edge, incoming } = this.#wire(action);
		incoming.set(
			action.microbatch,
			this.#waiting("backward-recv", () => edge.receiveBackward()),
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

	#chunk(chunk: Chunk): HeldChunk {
		return this.#chunks.find((held) => sameChunk(held.chunk, chunk))!;
	}

	#wire(edge: ChunkEdge): Wire {
		return this.#wires.find((wire) => sameEdge(wire, edge))!;
	}

	[Symbol.dispose](): void {
		for (const pass of this.#chunks.flatMap(({ passes }) => [...passes.values()])) pass[Symbol.dispose]();
		for (const { rows, incoming, outgoing, edge } of this.#wires) {
			const left = rows.values().flatMap(({ rows, companions = [] }) => [rows, ...companions]);
			for (const owned of [...left, ...incoming.values(), ...outgoing.values()]) owned?.[Symbol.dispose]();
			edge[Symbol.dispose]();
		}
	}
}

function sameEdge(one: ChunkEdge, other: ChunkEdge): boolean {
	return sameChunk(one.from, other.from) && sameChunk(one.to, other.to);
}

function finish({ passes }: HeldChunk, microbatch: number): void {
	take(passes, microbatch)![Symbol.dispose]();
}

function take<Value>(from: Map<number, Value>, key: number): Value | undefined {
	const value = from.get(key);
	from.delete(key);
	return value;
}
