/** Plans one rank: memory, operations and transfers, found by running it on a counting library. */
import { encoderTurns } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { MemoryTagName, OperationName } from "../native/abi.ts";
import { countingLibrary, type OperationValues } from "../native/counting-library.ts";
import { Device } from "../native/device.ts";
import type { DeviceKind } from "../native/library.ts";
import { topologyOf, visionModule } from "../parallel/index.ts";
import { type Chunk, chunkName, type Work } from "../schedule/actions.ts";
import { inFlight } from "../schedule/rank-actions.ts";
import { shapeOf } from "../train/assemble.ts";
import { specificationOf } from "../train/from-configuration.ts";
import { amountOf, type RatedName, ratedName, workOf } from "./operation-work.ts";
import { microbatchesOf, openRank, type Phase } from "./rank-run.ts";
import type { Transfer } from "./simulated-group.ts";

/** Calls of one operation with equal work. */
export interface OperationTally {
	readonly name: RatedName;
	/** The amount that the operation's time follows: floating-point operations or bytes of one call. */
	readonly amount: number;
	calls: number;
}

/** A transfer, and how often it happens. */
export interface TransferTally extends Transfer {
	readonly calls: number;
}

/** Work in a phase of a step of one microbatch: the mean of the microbatches. */
export interface PhaseTally {
	flops: number;
	readonly operations: OperationTally[];
	readonly transfers: TransferTally[];
}

/** Bytes. */
export interface RankMemoryPlan {
	readonly parameters: number;
	readonly gradients: number;
	readonly optimizer: number;
	/** Largest number of live bytes beyond these three: activations, workspace, data, transfers in flight. */
	readonly activations: number;
	readonly peak: number;
	/** A copy of the rank's training state in the host's memory, for a restart. */
	readonly kept: number;
}

export interface RankPlan {
	readonly rank: number;
	/** Names of its modules, and of its pipeline stage. */
	readonly module: string;
	/** Whether the language model is among them. */
	readonly language: boolean;
	readonly memory: RankMemoryPlan;
	readonly phases: Readonly<Record<Phase, PhaseTally>>;
	/** The work of each chunk by its name, without transfers over edges and sums over replicas. */
	readonly work: ReadonlyMap<string, Readonly<Record<Work["kind"], PhaseTally>>>;
	/** Sums over replicas that begin during the last microbatch's backward passes. */
	readonly overlapped: readonly TransferTally[];
}

/** Microbatches of a step that stands for any: with more of them no more memory is touched. */
export function enoughMicrobatches(c: TrainingConfiguration): number {
	return Math.min(inFlight(shapeOf(specificationOf(c), topologyOf(c))), microbatchesOf(c));
}

/** Accumulates operations by name and amount. */
class Tally implements PhaseTally {
	flops = 0;
	readonly transfers: TransferTally[] = [];
	readonly #operations = new Map<string, OperationTally>();

	/** `calls`: how often, in the mean. */
	add(name: OperationName, values: OperationValues, calls: number): void {
		const work = workOf(name, values);
		const rated = ratedName(name, values);
		const amount = amountOf(rated, work);
		this.flops += calls * work.flops;
		const key = `${rated} ${amount}`;
		const known = this.#operations.get(key);
		if (known) known.calls += calls;
		else this.#operations.set(key, { name: rated, amount, calls });
	}

	get operations(): OperationTally[] {
		return [...this.#operations.values()];
	}
}

function emptyWork(): Record<Work["kind"], Tally> {
	return { forward: new Tally(), backward: new Tally(), "weight gradient": new Tally() };
}

function emptyPhases(): Record<Phase, Tally> {
	return { prepare: new Tally(), ...emptyWork(), reduce: new Tally(), update: new Tally() };
}

/** Whether a transfer adds up gradients, or gathers parameters, of ranks that hold the same. */
export function sumsReplicas({ group }: Transfer): boolean {
	return /\.(dp|expt_dp)$/.test(group);
}

/** Whether the vision encoder sends or receives it over the edge to the language model, or between its stages. */
function isEncoderMessage({ group, kind }: Transfer): boolean {
	return (
		group.startsWith(`edge.${visionModule}.stages.`) ||
		(group === `edge.${visionModule}.forward` && kind === "send") ||
		(group === `edge.${visionModule}.backward` && kind === "receive")
	);
}

/** Tallies the work of a step while the rank runs on a counting library. */
class StepTally {
	readonly phases = emptyPhases();
	readonly work = new Map<string, Record<Work["kind"], Tally>>();
	/** Sums over replicas that begin during backward passes. */
	readonly overlapped: TransferTally[] = [];
	/** Lanes that encode in turn: each encodes one of this many microbatches. */
	readonly #turns: number;
	#counting = false;
	/** The chunk that is at work, and where its work is counted. */
	#chunk: Chunk | null = null;
	#tallies: readonly Tally[] = [];
	/** The last operation: it is counted when the next one comes, since a transfer may still tell its phase. */
	#last: { readonly name: OperationName; readonly values: OperationValues } | null = null;

	constructor(private readonly c: TrainingConfiguration) {
		this.#turns = encoderTurns(c);
	}

	/** Counts from now on, not only measures memory. */
	begin(): void {
		this.#counting = true;
	}

	end(): void {
		this.#flush();
		this.#tallies = [];
	}

	operation(name: OperationName, values: OperationValues): void {
		this.#flush();
		this.#last = { name, values };
		// Weights are rounded once a step, by the first pass that reads them.
		if (this.#counting && name === "e4m3_matrices") this.#flush([this.phases.prepare]);
	}

	phase(phase: Phase, chunk: Chunk | null): void {
		if (!this.#counting) return;
		this.#flush();
		this.#tallies = [this.phases[phase], ...(chunk === null ? [] : [this.#workOf(chunk, phase as Work["kind"])])];
		this.#chunk = chunk;
	}

	transfer(transfer: Transfer): void {
		if (this.#chunk && sumsReplicas(transfer)) {
			// Gradients are rounded for their sum right before it starts, once a step.
			if (this.c.gradReduceInBf16 && transfer.kind === "reduceScatter") this.#flush([this.phases.reduce]);
			this.overlapped.push({ ...transfer, calls: 1 });
		} else {
			const calls = this.#encodes || isEncoderMessage(transfer) ? 1 / this.#turns : 1;
			for (const tally of this.#tallies) tally.transfers.push({ ...transfer, calls });
		}
	}

	get #encodes(): boolean {
		return this.#chunk?.module === visionModule;
	}

	#workOf(chunk: Chunk, kind: Work["kind"]): Tally {
		const name = chunkName(chunk);
		if (!this.work.has(name)) this.work.set(name, emptyWork());
		return this.work.get(name)![kind];
	}

	/** Counts the last operation in `to`. */
	#flush(to: readonly Tally[] = this.#tallies): void {
		if (this.#last === null) return;
		const { name, values } = this.#last;
		for (const tally of to) tally.add(name, values, this.#encodes ? 1 / this.#turns : 1);
		this.#last = null;
	}
}

/** `imbalance`: rows that experts of this rank get, over those of an even routing. */
export async function planRank(
	c: TrainingConfiguration,
	rank: number,
	options: { readonly kind: DeviceKind; readonly imbalance: number },
): Promise<RankPlan> {
	const tally = new StepTally(c);
	using device = Device.open(
		countingLibrary({ kind: options.kind, observe: (name, values) => tally.operation(name, values) }),
	);
	using run = await openRank(c, device, rank, {
		phase: (phase, chunk) => tally.phase(phase, chunk),
		transfer: (transfer) => tally.transfer(transfer),
		imbalance: options.imbalance,
	});
	const { liveBytesByTag } = device.memoryStatistics();
	run.step(enoughMicrobatches(c), "fullest");
	const { peakBytes } = device.memoryStatistics();
	tally.begin();
	run.step(1);
	tally.end();
	const [parameters, gradients, optimizer] = (["parameter", "gradient", "optimizer"] as MemoryTagName[]).map(
		(tag) => liveBytesByTag[tag],
	) as [number, number, number];
	const activations = peakBytes - parameters - gradients - optimizer;
	const { phases, work, overlapped } = tally;
	return {
		rank,
		module: run.module,
		language: run.language,
		memory: { parameters, gradients, optimizer, activations, peak: peakBytes, kept: run.keptBytes },
		phases,
		work,
		overlapped,
	};
}
