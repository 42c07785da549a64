/** Refuses a run before its first step if its plan needs more memory than a device has. */
import { sharesRanks } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { DeviceInfo } from "../native/device.ts";
import type { DeviceKind } from "../native/library.ts";
import { topologyOf } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { planRank } from "./rank-plan.ts";
import { actorRanks } from "./run-plan.ts";

/** Bytes of a microbatch's rows and the vocabulary's up to which a plan takes seconds. */
const quicklyPlanned = 2 ** 33;

/** A rank's device and the ranks that share it, ascending. */
export interface SharedDevice extends Pick<DeviceInfo, "name" | "memoryBytes"> {
	readonly kind: DeviceKind;
	readonly ranks: readonly number[];
}

/**
 * Throws a UserError where ranks need more memory than their device has: all ranks of a processor, since the system kills
 * some process when its memory is out; of GPUs, which say so themselves, ranks that hold both modules. Of equal ranks on
 * devices of their own only the first counts; a device that does not tell its memory (0) refuses no run.
 */
export async function requireMemory(c: TrainingConfiguration, rank: number, device: SharedDevice): Promise<void> {
	const { memoryBytes, name, ranks, kind } = device;
	const both = sharesRanks(c) && topologyOf(c).worldSize > 1;
	if (!(both || kind === "cpu") || memoryBytes <= 0 || rank !== ranks[0]) return;
	const actors = actorRanks(c);
	if (ranks.length === 1 && !actors.some((actor) => actor.ranks[0] === rank)) return;
	const gibibytes = (bytes: number) => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
	const { sequence, vocabulary } = leastBytes(c);
	if (sequence + vocabulary > Math.max(memoryBytes, quicklyPlanned)) {
		const what =
			sequence > vocabulary
				? `A microbatch of ${c.microBatchSize} × ${c.seqLength} tokens (micro-batch-size × seq-length)`
				: `A vocabulary of ${c.vocabSize} tokens (vocab-size)`;
		throw new UserError(
			`${what} needs ${gibibytes(Math.max(sequence, vocabulary))} at least; ${name} has ${gibibytes(memoryBytes)}.`,
		);
	}
	let needed = 0;
	for (const actor of actors) {
		const here = actor.ranks.filter((one) => ranks.includes(one));
		if (here.length === 0) continue;
		const peak = await peakOf(c, here[0]!, kind);
		if (peak === null) return;
		needed += here.length * peak;
	}
	if (needed <= memoryBytes) return;
	const alone = ranks.length === 1;
	const subject = alone ? `Rank ${rank}` : `${ranks.length} ranks share ${name}${both ? "," : ""}`;
	const verb = both ? (alone ? " holds both modules and" : " hold both modules and") : alone ? "" : " and";
	const remedies = both
		? "Recomputed layers, more tensor-parallel or expert-parallel ranks, more pipeline stages, or ranks of its own for the encoder (llm-offset) need less."
		: "Recomputed layers, a smaller micro-batch-size or seq-length, a smaller model or another machine need less; `mimo plan` shows where it goes.";
	throw new UserError(
		`${subject}${verb} ${alone ? "needs" : "need"} ${gibibytes(needed)} at the peak, as mimo plan counts; ${name} has ${gibibytes(memoryBytes)}. ${remedies}`,
	);
}

/**
 * Bytes that a rank of the language model needs whatever else it holds: a row in bf16 of every token, and of the vocabulary. Of
 * sizes far beyond a machine a plan would take minutes, or all the memory itself.
 */
function leastBytes(c: TrainingConfiguration): { readonly sequence: number; readonly vocabulary: number } {
	const row = 2 * c.hiddenSize;
	return {
		sequence: (c.microBatchSize * c.seqLength * row) / (c.llmTp * c.llmCp),
		vocabulary: ((c.vocabSize ?? 0) * row) / c.llmTp,
	};
}

/** Bytes of a rank at its peak; null: a plan cannot imitate its data. */
async function peakOf(c: TrainingConfiguration, rank: number, kind: DeviceKind): Promise<number | null> {
	try {
		return (await planRank(c, rank, { kind, imbalance: 1 })).memory.peak;
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}
