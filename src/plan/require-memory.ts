/** Refuses a run before its first step if its plan needs more memory than a device has. */
import { dataLanes, encoderMicroBatchSize, sharesRanks } from "../config/derive.ts";
import { modulesOf } from "../config/modules.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { fullestSample, mockImage, patchCount } from "../data/mock.ts";
import { hybridConfig } from "../models/language/from-configuration.ts";
import { hybridParameters } from "../models/language/names.ts";
import type { ParameterSpec } from "../models/parameter-spec.ts";
import { projectorParameters } from "../models/vision/projector.ts";
import type { DeviceInfo } from "../native/device.ts";
import type { DeviceKind } from "../native/library.ts";
import { topologyOf, visionModule } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { elementCount } from "../tensor/index.ts";
import { encodersOf } from "../train/from-configuration.ts";
import { enoughMicrobatches, planRank } from "./rank-plan.ts";
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
	const needed = await bytesAtPeak(c, actors, device);
	if (needed === null || needed <= memoryBytes) return;
	const alone = ranks.length === 1;
	const subject = alone ? `Rank ${rank}` : `${ranks.length} ranks share ${name}${both ? "," : ""}`;
	const verb = both ? (alone ? " holds both modules and" : " hold both modules and") : alone ? "" : " and";
	const remedies = both
		? "Recomputed layers, more tensor-parallel or expert-parallel ranks, more pipeline stages, or ranks of its own for the encoder (llm-offset) need less."
		: "Recomputed layers, a smaller micro-batch-size or seq-length, a smaller model or another machine need less; `mimo plan` shows where it goes.";
	const packs = fullestSample(c) === null ? "" : " Packs full of images are counted; packing-max-patches bounds them.";
	throw new UserError(
		`${subject}${verb} ${alone ? "needs" : "need"} ${gibibytes(needed)} at the peak, as mimo plan counts; ${name} has ${gibibytes(memoryBytes)}. ${remedies}${packs}`,
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

/**
 * Bytes that no rank comes near: twice the states of the whole model, and per token four fp32 rows of what each weight reads and
 * writes. A plan takes as long as a step of a small model, this a thousandth.
 */
export function generousBytes(c: TrainingConfiguration): number {
	const bytes = (specs: readonly ParameterSpec[], tokens: number) =>
		specs.reduce((sum, { shape, experts }) => {
			const perToken = 4 * 4 * (shape[0]! + shape.at(-1)!);
			return sum + (experts ?? 1) * (2 * 20 * elementCount(shape) + perToken * tokens);
		}, 0);
	const microbatches = enoughMicrobatches(c);
	const language = bytes(hybridParameters(hybridConfig(c)), microbatches * c.microBatchSize * c.seqLength);
	const { grids } = fullestSample(c) ?? { grids: [mockImage(c).grid] };
	const patches = new Map([
		[visionModule, encoderMicroBatchSize(c) * patchCount(grids)],
		...modulesOf(c).map(({ name, dp, frames }) => [name, (frames * c.microBatchSize * dataLanes(c)) / dp] as const),
	]);
	return encodersOf(c).reduce((sum, { parts: { name, tower, projector } }) => {
		const specs = [...tower.parameters(), ...projectorParameters(projector, name)];
		return sum + bytes(specs, microbatches * patches.get(name)!);
	}, language);
}

/** Bytes of a device's ranks at their peak; null: they fit by far, or a plan cannot imitate the data. */
async function bytesAtPeak(
	c: TrainingConfiguration,
	actors: ReturnType<typeof actorRanks>,
	{ ranks, memoryBytes, kind }: SharedDevice,
): Promise<number | null> {
	try {
		if (ranks.length * generousBytes(c) <= memoryBytes) return null;
		let needed = 0;
		for (const actor of actors) {
			const here = actor.ranks.filter((one) => ranks.includes(one));
			if (here.length === 0) continue;
			needed += here.length * (await planRank(c, here[0]!, { kind, imbalance: 1 })).memory.peak;
		}
		return needed;
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}
