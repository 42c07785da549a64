/** What one rank needs and does: memory, operations and transfers, found by running it on a library that only counts. */
import { encoderTurns } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { MemoryTagName, OperationName } from "../native/abi.ts";
import { countingLibrary, type OperationValues } from "../native/counting-library.ts";
import { Device } from "../native/device.ts";
import type { DeviceKind } from "../native/library.ts";
import { topologyOf } from "../parallel/topology.ts";
import { type Chunk, chunkName, encoderChunk, type Work } from "../schedule/actions.ts";
import { inFlight } from "../schedule/rank-actions.ts";
import { shapeOf } from "../train/assemble.ts";
import { specificationOf } from "../train/specification.ts";
import type { Transfer } from "./imagined-group.ts";
import { amountOf, workOf } from "./operation-work.ts";
import { microbatchesOf, openRank, type Phase } from "./rank-run.ts";

/** Calls of one operation with equal work. */
export interface OperationTally {
	readonly name: OperationName;
	/** What its time follows: floating-point operations or bytes of one call. */
	readonly amount: number;
	calls: number;
}

/** What happens in a phase of a step of one microbatch. */
export interface PhaseTally {
	flops: number;
	readonly operations: OperationTally[];
	readonly transfers: Transfer[];
}

/** Bytes. */
export interface RankMemoryPlan {
	readonly parameters: number;
	readonly gradients: number;
	readonly optimizer: number;
	/** The most that is live at once beyond those three: activations, workspace, data, what is under way. */
	readonly activations: number;
	readonly peak: number;
}

export interface RankPlan {
	readonly rank: number;
	/** Names of its modules, and of its pipeline stage. */
	readonly module: string;
	readonly memory: RankMemoryPlan;
	readonly phases: Readonly<Record<Phase, PhaseTally>>;
	/** The work of each chunk by its name, without what moves over edges and sums over replicas. */
	readonly work: ReadonlyMap<string, Readonly<Record<Work["kind"], PhaseTally>>>;
	/** Sums over replicas that begin during the last microbatch's backward passes. */
	readonly overlapped: readonly Transfer[];
}

/** Microbatches of a step that stands for any: with more of them no more memory is touched. */
export function enoughMicrobatches(c: TrainingConfiguration): number {
	return Math.min(inFlight(shapeOf(specificationOf(c), topologyOf(c))), microbatchesOf(c));
}

/** Adds operations up by name and amount. */
export class Tally implements PhaseTally {
	flops = 0;
	readonly transfers: Transfer[] = [];
	readonly #operations = new Map<string, OperationTally>();

	add(name: OperationName, values: OperationValues): void {
		const work = workOf(name, values);
		const amount = amountOf(name, work);
		this.flops += work.flops;
		const key = `${name} ${amount}`;
		const known = this.#operations.get(key);
		if (known) known.calls++;
		else this.#operations.set(key, { name, amount, calls: 1 });
	}

	/** Divides the sums: operations keep their amounts and have fewer calls. */
	divide(by: number): void {
		this.flops /= by;
		for (const tally of this.#operations.values()) tally.calls /= by;
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

/** `imbalance`: rows that experts of this rank get, over those of an even routing. */
export async function planRank(
	c: TrainingConfiguration,
	rank: number,
	options: { readonly kind: DeviceKind; readonly imbalance: number },
): Promise<RankPlan> {
	const phases = emptyPhases();
	const work = new Map<string, Record<Work["kind"], Tally>>();
	const overlapped: Transfer[] = [];
	const tallyOf = (chunk: Chunk, kind: Work["kind"]) => {
		const name = chunkName(chunk);
		if (!work.has(name)) work.set(name, emptyWork());
		return work.get(name)![kind];
	};
	let working = false;
	let tallies: readonly Tally[] = [];
	using device = Device.open(
		countingLibrary({
			kind: options.kind,
			observe: (name, values) => {
				for (const tally of tallies) tally.add(name, values);
			},
		}),
	);
	let counting = false;
	using run = await openRank(c, device, rank, {
		phase: (phase, chunk) => {
			if (!counting) return;
			tallies = [phases[phase], ...(chunk === null ? [] : [tallyOf(chunk, phase as Work["kind"])])];
			working = chunk !== null;
		},
		transfer: (transfer) => {
			if (working && sumsReplicas(transfer)) overlapped.push(transfer);
			else for (const tally of tallies) tally.transfers.push(transfer);
		},
		imbalance: options.imbalance,
	});
	const { liveBytesByTag } = device.memoryStatistics();
	run.step(enoughMicrobatches(c));
	const { peakBytes } = device.memoryStatistics();
	counting = true;
	run.step(1);
	tallies = [];
	// Of lanes that encode in turn, each encodes one of `encoderTurns` microbatches.
	for (const tally of Object.values(work.get(chunkName(encoderChunk)) ?? {})) tally.divide(encoderTurns(c));
	const [parameters, gradients, optimizer] = (["parameter", "gradient", "optimizer"] as MemoryTagName[]).map(
		(tag) => liveBytesByTag[tag],
	) as [number, number, number];
	const activations = peakBytes - parameters - gradients - optimizer;
	return {
		rank,
		module: run.module,
		memory: { parameters, gradients, optimizer, activations, peak: peakBytes },
		phases,
		work,
		overlapped,
	};
}
